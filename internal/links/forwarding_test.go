package links

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

// netconf is a struct netconfmsg with an interface's index and whether it forwards.
func netconf(family byte, index, on uint32) []byte {
	m := []byte{family, 0, 0, 0}
	for _, a := range [][2]uint32{{netconfIndex, index}, {netconfForwarding, on}} {
		m = binary.NativeEndian.AppendUint16(m, 8)
		m = binary.NativeEndian.AppendUint16(m, uint16(a[0]))
		m = binary.NativeEndian.AppendUint32(m, a[1])
	}
	return m
}

// FuzzParseNetconf checks that an interface is said to forward, or not to, only where the kernel has said so of
// that very interface and family.
func FuzzParseNetconf(f *testing.F) {
	f.Add(netconf(unix.AF_INET, 7, 1), unix.AF_INET)
	f.Add(netconf(unix.AF_INET6, 1<<32-1, 0), unix.AF_INET6)
	f.Add(netconf(unix.AF_INET, 7, 1)[:12], unix.AF_INET)                                    // no word of forwarding
	f.Add(netconf(unix.AF_INET, 7, 1)[:17], unix.AF_INET)                                    // nor of what it is
	f.Add([]byte{unix.AF_INET, 0, 0, 0, 9, 0, netconfIndex, 0, 7, 0, 0, 0, 0}, unix.AF_INET) // no padding at the end
	f.Fuzz(func(t *testing.T, message []byte, family int) {
		message = message[:len(message):len(message)]
		index, on, ok := parseNetconf(message, family)
		if !ok {
			return
		}
		if int(message[0]) != family || len(message) < 4+8+8 {
			t.Errorf("%x of family %d: interface %d forwards: %v", message, family, index, on)
		}
		value := uint32(0)
		if on {
			value = 1
		}
		i, forwards, ok := parseNetconf(netconf(byte(family), uint32(int32(index)), value), family)
		if !ok || i != index || forwards != on {
			t.Errorf("interface %d, %v is read back as %d, %v, %v", index, on, i, forwards, ok)
		}
	})
}
