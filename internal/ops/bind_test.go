package ops

import (
	"slices"
	"strings"
	"testing"
)

func TestBindAddresses(t *testing.T) {
	for _, test := range []struct {
		list, node string
		want       []string
		refused    string
	}{
		{list: ""},
		{list: "0"},
		{list: ":7480", want: []string{":7480"}},
		{list: "localhost:7480", want: []string{"127.0.0.1:7480"}},
		{list: "node:7480", node: "10.0.0.1", want: []string{"10.0.0.1:7480"}},
		{list: "node:7480, localhost:7480", node: "fd00::1", want: []string{"[fd00::1]:7480", "127.0.0.1:7480"}},
		{list: "[::1]:7480,192.0.2.1:1", want: []string{"[::1]:7480", "192.0.2.1:1"}},
		{list: "node:7480", refused: `needs the node's IP address in the environment variable NODE_IP, which is ""`},
		{list: "node:7480", node: "worker-1", refused: `which is "worker-1"`},
		{list: "7480", refused: `"7480" is not address:port`},
		{list: ":7480,", refused: `"" is not address:port`},
		{list: "worker-1:7480", refused: `"worker-1" is neither an IP address nor localhost nor node`},
		{list: ":70000", refused: `"70000" is not a port`},
		{list: "fd00::1:7480", refused: "is not address:port"},
	} {
		got, err := bindAddresses(test.list, func(name string) (string, bool) { return test.node, name == nodeAddress })
		switch {
		case test.refused == "" && err == nil && slices.Equal(got, test.want):
		case test.refused != "" && err != nil && strings.Contains(err.Error(), test.refused):
		default:
			t.Errorf("%q with node %q: %q, %v; want %q %q", test.list, test.node, got, err, test.want, test.refused)
		}
	}
}
