package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/iptables"
)

func TestConntrackParameters(t *testing.T) {
	for _, tt := range []struct {
		name                                  string
		cores                                 int
		liberal                               bool
		most, hash, established, wait, closed string // before, "-" for none; the result after the slash
	}{
		{"a small node", 2, false, "65536/131072", "16384/32768", "432000/86400", "60/3600", "0/0"},
		{"a large node, be liberal", 64, true, "65536/1048576", "16384/262144", "432000/86400", "3600/3600", "0/1"},
		{"more is left alone, and so are shorter times", 2, false, "999999/999999", "99999/99999", "600/600", "3600/3600",
			"1/1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			folder := t.TempDir()
			if err := os.Mkdir(filepath.Join(folder, conntrackFolder), 0o700); err != nil {
				t.Fatal(err)
			}
			files := map[string]string{parameterBuckets: tt.hash, parameterMax: tt.most, parameterTimeout: tt.established,
				parameterWait: tt.wait, parameterLiberal: tt.closed}
			for name, value := range files {
				before, _, _ := strings.Cut(value, "/")
				if err := os.WriteFile(filepath.Join(folder, name), []byte(before+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			kernelParameters{folder, slog.New(slog.DiscardHandler)}.conntrack(tt.cores, tt.liberal)
			for name, value := range files {
				_, want, _ := strings.Cut(value, "/")
				if got, err := os.ReadFile(filepath.Join(folder, name)); err != nil || strings.TrimSpace(string(got)) != want {
					t.Errorf("%s is %s, want %s (%v)", name, got, want, err)
				}
			}
		})
	}
}

func TestConntrackParametersThatCannotBeSet(t *testing.T) {
	var said bytes.Buffer
	kernelParameters{"/nowhere", slog.New(slog.NewTextHandler(&said, nil))}.conntrack(2, true)
	for _, name := range []string{parameterMax, parameterTimeout, parameterWait, parameterLiberal} {
		if !strings.Contains(said.String(), name) {
			t.Errorf("the log does not say that %s was not set:\n%s", name, said.String())
		}
	}
}

// As in a container: /proc/sys is read-only, the host's folder is mounted elsewhere, and of root's
// powers two are left.
func TestParametersAreSetFromAContainer(t *testing.T) {
	ns := nstest.New(t)
	const script = `set -e
		mount --bind /proc/sys/net "$1"
		mount -o remount,bind,ro /proc/sys 2>/dev/null || { mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys; }
		setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+net_admin,+net_raw sh -c '
			! echo 1 2>/dev/null > /proc/sys/net/ipv4/conf/all/route_localnet || { echo not read-only; exit 1; }
			echo 1 > "$0/ipv4/conf/all/route_localnet"
			echo 1 > "$0/netfilter/nf_conntrack_tcp_be_liberal"' "$1"`
	ns.Run(t, "unshare", "--mount", "sh", "-c", script, "sh", t.TempDir())
	for _, name := range []string{"ipv4/conf/all/route_localnet", "netfilter/nf_conntrack_tcp_be_liberal"} {
		if got := strings.TrimSpace(ns.Run(t, "cat", "/proc/sys/net/"+name)); got != "1" {
			t.Errorf("%s is %s", name, got)
		}
	}
}

func TestRedirectingInterfaces(t *testing.T) {
	folder := t.TempDir()
	write := func(name, value string) {
		t.Helper()
		file := filepath.Join(folder, interfaceFolder, name, parameterRedirect)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	check := func(want string) {
		t.Helper()
		if got := strings.Join(kernelParameters{folder: folder}.redirecting(), " "); got != want {
			t.Errorf("redirects are sent at %q, want %q", got, want)
		}
	}
	check("")
	for name, value := range map[string]string{"all": "0", "default": "1", "lo": "1", "eth0": "1", "eth1": "0"} {
		write(name, value)
	}
	check("eth0")
	write("all", "1")
	check("eth0 eth1")
	write("all", "0")
	write("eth0", "0")
	check("")
}

// What Landfall has set it sets back, when its rules go or the flag changes, also after a restart;
// what the administrator has set, and what kube-proxy needs, stays.
func TestWhatLandfallHasSetItSetsBack(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before string // route_localnet
		story  string // start, off (start without the node ports), kube (kube-proxy comes), cleanup
		after  string
		noted  bool
	}{
		{"set and cleaned up", "0", "start cleanup", "0", false},
		{"cleaned up after restarts", "0", "start start start cleanup cleanup", "0", false},
		{"the administrator's", "1", "start start cleanup", "1", false},
		{"the administrator's, and the flag is off", "1", "off cleanup", "1", false},
		{"the flag goes off", "0", "start off", "0", true}, // the actor removes the note
		{"the flag is off", "0", "off", "0", false},
		{"kept while it serves", "0", "start start", "1", true},
		{"kube-proxy needs it", "0", "start kube cleanup", "1", false},
		{"kube-proxy needs it, and the flag goes off", "0", "start kube off", "1", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			ns.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet="+tt.before)
			parameters := kernelParameters{"/proc/sys/net", slog.New(slog.DiscardHandler)}
			ns.Do(t, func() error {
				for step := range strings.FieldsSeq(tt.story) {
					commands, err := iptables.Detect(t.Context(), lb.IPv4)
					if err != nil {
						return err
					}
					switch step {
					case "start", "off":
						s := settings{loopbackNodePorts: step == "start"}
						s.prepareKernel(t.Context(), parameters, kernel{mode: modeIptables,
							commands: map[lb.Family]iptables.Kernel{lb.IPv4: commands}})
						if step == "start" && !parameters.on(routeLocalnet) {
							t.Error("not set")
						}
						if step == "start" && tt.before == "0" && !s.setRouteLocalnet {
							t.Error("the rules would not keep the note")
						}
					case "kube":
						err = commands.Restore(t.Context(),
							"*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n")
					case "cleanup":
						err = cleanup(t.Context(), parameters)
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
			if got := strings.TrimSpace(ns.Run(t, "cat", "/proc/sys/net/"+routeLocalnet)); got != tt.after {
				t.Errorf("route_localnet is %s, want %s", got, tt.after)
			}
			if noted := strings.Contains(ns.Run(t, "iptables-save"), "LF-SET-ROUTE-LOCALNET"); noted != tt.noted {
				t.Errorf("noted: %v, want %v", noted, tt.noted)
			}
		})
	}
}

// Conntrack is liberal while the flag says so; after that the proxy drops invalid packets again. Cleanup leaves what
// was there before.
func TestConntrackIsNotLiberalForEver(t *testing.T) {
	for _, tt := range []struct {
		name, before string
		// start, off (start without the flag), look, flush (of all rules), cleanup; or a value that the administrator sets
		story string
		after string
		noted bool
	}{
		{"set", "0", "start look", "1", true},
		{"the flag goes off", "0", "start look off look", "0", false},
		{"cleaned up after restarts", "0", "start start look cleanup cleanup", "0", false},
		{"the administrator's", "1", "start look off cleanup", "1", false},
		{"the administrator ends it", "0", "start 0 cleanup", "0", false},
		{"the flag is off", "0", "off look cleanup", "0", false},
		{"flushed, and noted again", "0", "start look flush look off", "0", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			put := func(value string) { ns.Run(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_be_liberal="+value) }
			put(tt.before)
			parameters := kernelParameters{"/proc/sys/net", slog.New(slog.DiscardHandler)}
			var f flags
			var kept *nodeParameter
			for step := range strings.FieldsSeq(tt.story) {
				switch step {
				case "start", "off":
					f, kept = flags{liberal: step == "start"}, newLiberal(parameters)
					var s settings
					ns.Do(t, func() error { f.prepare(t.Context(), &s, parameters, kernel{mode: modeNftables}); return nil })
					if want := !f.liberal && tt.before == "0"; s.dropInvalid != want {
						t.Errorf("%s: drops invalid packets: %v, want %v", step, s.dropInvalid, want)
					}
				case "look":
					ns.Do(t, func() error { kept.set(f.liberal); return nil })
				case "flush":
					ns.Run(t, "nft", "flush", "ruleset")
				case "cleanup":
					ns.Do(t, func() error { return cleanup(t.Context(), parameters) })
				default:
					put(step)
				}
			}
			if got := strings.TrimSpace(ns.Run(t, "cat", "/proc/sys/net/"+parameterLiberal)); got != tt.after {
				t.Errorf("it is %s, want %s", got, tt.after)
			}
			if noted := strings.Contains(ns.Run(t, "nft", "list", "tables"), "landfall-settings"); noted != tt.noted {
				t.Errorf("noted: %v, want %v", noted, tt.noted)
			}
		})
	}
}

// memory is a localnetMemory that fails.
type memory struct{ set, mark error }

func (m memory) Set(context.Context) (set, needed bool, err error) { return false, false, m.set }
func (m memory) Mark(context.Context) error                        { return m.mark }

// Where nothing can be noted, or read, node ports work all the same. What Landfall has set itself is
// noted with the rules then; what it does not know about is not set back.
func TestRouteLocalnetWithoutMemory(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, routeLocalnet)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, before := range []string{"0\n", "1\n"} {
		if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		s := settings{loopbackNodePorts: true}
		broken := errors.New("no lock")
		s.prepareLocalnet(t.Context(), kernelParameters{folder, slog.New(slog.DiscardHandler)}, memory{broken, broken})
		if now, err := os.ReadFile(file); err != nil || string(now) != "1\n" || s.setRouteLocalnet != (before == "0\n") ||
			!s.loopbackNodePorts {
			t.Errorf("before %q: now %q, settings %+v (%v)", before, now, s, err)
		}
	}
}

// without is a kernel without the match recent.
type without struct{ iptables.Kernel }

func (without) Restore(_ context.Context, input string) error {
	if strings.Contains(input, "-m recent") {
		return errors.New("no such match")
	}
	return nil
}

// A kernel that cannot lead to the relay would refuse all rules for it.
func TestNoRelayWithoutTheMatchRecent(t *testing.T) {
	parameters := kernelParameters{t.TempDir(), slog.New(slog.DiscardHandler)}
	for mode, want := range map[string]bool{modeIptables: false, modeNftables: true} {
		s := settings{relay: true}
		s.prepareKernel(t.Context(), parameters, kernel{mode: mode,
			commands: map[lb.Family]iptables.Kernel{lb.IPv6: without{}}})
		if s.relay != want {
			t.Errorf("%s mode relays: %v, want %v", mode, s.relay, want)
		}
	}
}
