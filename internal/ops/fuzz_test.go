package ops

import (
	"errors"
	"net"
	"testing"

	"github.com/spf13/pflag"
)

// FuzzFlags checks that arguments and variables are read, or refused as a mistake of the one who
// wrote them.
func FuzzFlags(f *testing.F) {
	f.Add("--count=3", "5", ":7480,node:7481", "10.0.0.1")
	f.Add("--", "", "0", "")
	f.Add("--count", "9223372036854775808", "[::1]:65536", "nonsense")
	f.Fuzz(func(t *testing.T, argument, variable, bind, node string) {
		flags := pflag.NewFlagSet("x", pflag.ContinueOnError)
		flags.Int("count", 1, "")
		flags.Duration("every", 0, "")
		env := func(name string) (string, bool) {
			switch name {
			case "LANDFALL_COUNT":
				return variable, variable != ""
			case nodeAddress:
				return node, true
			}
			return "", false
		}
		var wrong usageError
		if err := parse(flags, []string{argument}, env); err != nil && !errors.As(err, &wrong) &&
			!errors.Is(err, pflag.ErrHelp) {
			t.Errorf("%q and %q: %v", argument, variable, err)
		}
		addresses, err := bindAddresses(bind, env)
		if err != nil && !errors.As(err, &wrong) {
			t.Errorf("%q: %v", bind, err)
		}
		for _, address := range addresses {
			if host, _, err := net.SplitHostPort(address); err != nil || host != "" && net.ParseIP(host) == nil {
				t.Errorf("%q is read as %q", bind, address)
			}
		}
		if level, err := parseLevel(variable); err == nil && level.String() == "" {
			t.Errorf("%q is a level without a name", variable)
		}
	})
}
