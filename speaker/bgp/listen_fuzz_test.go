package bgp

import (
	"net"
	"testing"
)

// FuzzCheckListen checks that an address that is taken has a host and a port.
func FuzzCheckListen(f *testing.F) {
	for _, address := range []string{":179", "[::]:1179", "10.0.0.1:0", "224.0.0.1:179", "[fe80::1%eth0]:179", "x"} {
		f.Add(address)
	}
	f.Fuzz(func(t *testing.T, address string) {
		if CheckListen(address) != nil {
			return
		}
		host, port, err := net.SplitHostPort(address)
		if err != nil || port == "" || host == "x" {
			t.Errorf("%q: %q, %q, %v", address, host, port, err)
		}
	})
}
