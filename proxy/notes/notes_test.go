package notes

import (
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// One parameter of each kind, as Landfall has them.
var (
	filter = Parameter{Path: "conf/*/rp_filter", Value: 2, Table: "landfall-settings", Prefix: "rp-filter-was-"}
	reuse  = Parameter{Path: "tcp_tw_reuse", Value: 1, Table: "landfall-settings-tcp", Prefix: "tcp-tw-reuse-was-"}
)

// site is a node whose parameters are files.
type site struct {
	t      *testing.T
	ns     *nstest.NS
	conn   *nfnetlink.Conn
	folder string
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, ns: nstest.New(t), folder: t.TempDir()}
	s.ns.Do(t, func() (err error) {
		s.conn, err = nfnetlink.Open()
		return err
	})
	t.Cleanup(s.conn.Close)
	return s
}

// put has the administrator write a parameter.
func (s *site) put(p Parameter, iface string, value int) {
	s.t.Helper()
	file := p.file(s.folder, iface)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strconv.Itoa(value)+"\n"), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) set(p Parameter, iface string) {
	s.t.Helper()
	was, err := p.Read(s.folder, iface)
	if err == nil {
		err = p.Set(s.conn, s.folder, iface, was)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) want(what string, p Parameter, iface string, value int) {
	s.t.Helper()
	if now, err := p.Read(s.folder, iface); err != nil || now != value {
		s.t.Errorf("%s: %s of %q is %d, %v, want %d", what, p.Path, iface, now, err, value)
	}
}

// wantNotes compares what the kernel has noted.
func (s *site) wantNotes(what string, p Parameter, want map[string]int) {
	s.t.Helper()
	if got, err := p.read(s.conn); err != nil || !maps.Equal(got, want) {
		s.t.Errorf("%s: noted %v, %v, want %v", what, got, err, want)
	}
	if listed := strings.Contains(s.ns.Run(s.t, "nft", "list", "tables"), p.Table+"\n"); listed != (len(want) > 0) {
		s.t.Errorf("%s: the table %s is there: %v", what, p.Table, listed)
	}
}

// What is set is set back: by a successor too, and after a flush by whoever remembers it. What
// others have set since stays.
func TestContract11WhatIsSetIsSetBack(t *testing.T) {
	for _, tt := range []struct {
		name  string
		story string // set, keep, flush, restart, restore, or the value that an administrator sets
		noted bool
		stays string // the value in the end; "" for the one before
	}{
		{"at once", "set restore", false, ""},
		{"set", "set keep keep", true, "ours"},
		{"by a successor", "set keep restart restore restore", false, ""},
		{"flushed", "set keep flush restore", false, ""},
		{"flushed, and noted again for a successor", "set keep flush keep restart restore", false, ""},
		{"a successor, and flushed", "set restart keep flush restore", false, ""},
		{"others have set it", "set keep other restore", false, "other"},
		{"others have set it after a flush", "set keep flush other keep ours restore", false, "ours"},
		{"others have set it, and once more", "set keep other set keep flush restore", false, "other"},
		{"nothing is set", "keep ours restore", false, "ours"},
	} {
		for _, p := range []Parameter{filter, reuse} {
			others := [2]int{0, 3 - p.Value}
			for at, before := range others {
				what := tt.name + ": " + p.Path
				s, noted := newSite(t), map[string]int{}
				values := map[string]int{"": before, "ours": p.Value, "other": others[1-at]}
				ifaces := []string{""}
				if p.perInterface() {
					ifaces = []string{"lan", "lan2"}
				}
				each := func(do func(iface string)) {
					for _, iface := range ifaces {
						do(iface)
					}
				}
				each(func(iface string) { s.put(p, iface, before) })
				for step := range strings.FieldsSeq(tt.story) {
					switch step {
					case "set":
						each(func(iface string) { s.set(p, iface) })
					case "keep":
						if err := p.Keep(s.conn, s.folder, noted); err != nil {
							t.Errorf("%s: %v", what, err)
						}
					case "flush":
						s.ns.Run(t, "nft", "flush", "ruleset")
					case "restart":
						noted = nil
						if strings.Contains(tt.story, "restart keep") {
							noted = map[string]int{}
						}
					case "restore":
						if _, err := p.Restore(s.conn, s.folder, noted); err != nil || len(noted) > 0 {
							t.Errorf("%s: remembers %v, %v", what, noted, err)
						}
					default:
						each(func(iface string) { s.put(p, iface, values[step]) })
					}
				}
				want := map[string]int{}
				each(func(iface string) {
					s.want(what, p, iface, values[tt.stays])
					if tt.noted {
						want[iface] = before
					}
				})
				s.wantNotes(what, p, want)
			}
		}
	}
}

// A note of an interface that is gone goes, and with the last one the table: one that is made with its name later has
// the value that its administrator sets, and not what the one before it had.
func TestContract11ANoteEndsWithItsInterface(t *testing.T) {
	for _, tt := range []struct {
		name  string
		flush bool
		gone  []string
		noted map[string]int
	}{
		{"one of two", false, []string{"lan"}, map[string]int{"lan2": 0}},
		{"both", false, []string{"lan", "lan2"}, nil},
		{"one of two, after a flush", true, []string{"lan"}, map[string]int{"lan2": 0}},
	} {
		s, noted := newSite(t), map[string]int{}
		for _, iface := range []string{"lan", "lan2"} {
			s.put(filter, iface, 0)
			s.set(filter, iface)
		}
		keep := func() {
			t.Helper()
			if err := filter.Keep(s.conn, s.folder, noted); err != nil {
				t.Fatal(err)
			}
		}
		keep()
		for _, iface := range tt.gone {
			if err := os.RemoveAll(filepath.Dir(filter.file(s.folder, iface))); err != nil {
				t.Fatal(err)
			}
		}
		if tt.flush {
			s.ns.Run(t, "nft", "flush", "ruleset")
		}
		keep()
		s.wantNotes(tt.name, filter, tt.noted)
		for _, iface := range tt.gone {
			s.put(filter, iface, 2)
		}
		keep()
		if !maps.Equal(noted, tt.noted) {
			t.Errorf("%s: remembers %v, want %v", tt.name, noted, tt.noted)
		}
		if _, err := filter.Restore(s.conn, s.folder, noted); err != nil {
			t.Error(err)
		}
		for _, iface := range tt.gone {
			s.want(tt.name, filter, iface, 2)
		}
	}
}

// Where no parameters can be seen at all, none counts as gone.
func TestContract11NotesOutliveAFolderThatIsMissing(t *testing.T) {
	for _, p := range []Parameter{filter, reuse} {
		s, noted := newSite(t), map[string]int{}
		iface := ""
		if p.perInterface() {
			iface = "lan"
		}
		s.put(p, iface, 0)
		s.set(p, iface)
		if err := p.Keep(s.conn, filepath.Join(s.folder, "missing"), noted); err != nil {
			t.Fatal(err)
		}
		s.wantNotes("no folder", p, map[string]int{iface: 0})
	}
}

// One that cannot be set back keeps no other as it is, and what is set back is forgotten: an
// administrator may set it to the same value next.
func TestContract11WhatIsSetBackIsForgottenBesideWhatIsNot(t *testing.T) {
	s, noted := newSite(t), map[string]int{}
	s.put(filter, "lan", 1)
	s.set(filter, "lan")
	s.put(filter, "stuck", 0)
	s.set(filter, "stuck")
	file := filter.file(s.folder, "stuck")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/sys/net/ipv4/igmp_qrv", file); err != nil { // which is 2, and takes no 0
		t.Fatal(err)
	}
	if err := filter.Keep(s.conn, s.folder, noted); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		reset, err := filter.Restore(s.conn, s.folder, noted)
		if err == nil || len(noted) != 1 {
			t.Errorf("set back %q, %v, remembers %v", reset, err, noted)
		}
		s.wantNotes("one is stuck", filter, map[string]int{"stuck": 0})
		if err := filter.Keep(s.conn, s.folder, noted); err != nil {
			t.Fatal(err)
		}
		s.put(filter, "lan", 2)
	}
	s.want("set by an administrator", filter, "lan", 2)
}

// What cannot be noted is not set.
func TestWhatCannotBeNotedIsNotSet(t *testing.T) {
	for _, p := range []Parameter{filter, reuse} {
		s := newSite(t)
		s.put(p, "lan", 0)
		s.ns.Run(t, "nft", "add", "table", "ip", p.Table)
		s.ns.Run(t, "nft", "add", "set", "ip", p.Table, p.set(0).Name, "{ type ether_addr; }")
		if err := p.Set(s.conn, s.folder, "lan", 0); err == nil {
			t.Errorf("%s was set", p.Path)
		}
		s.want("not noted", p, "lan", 0)
	}
}

// A kernel without nftables has no notes: the answer is that of the kernel here about a subsystem
// that it does not have.
func TestAKernelWithoutNftablesHasNoNotes(t *testing.T) {
	s := newSite(t)
	const none = 0xfe
	var m nfnetlink.Messages
	m.Add(none<<8|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, unix.NFPROTO_IPV4, "list", func() {})
	if err := s.conn.Dump(&m, func(nfnetlink.Message) error { return nil }); !unavailable(err) {
		t.Errorf("the kernel says %v", err)
	}
	m = nfnetlink.Messages{}
	m.Add(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, unix.NFPROTO_IPV4, "list", func() {})
	if err := s.conn.Dump(&m, func(nfnetlink.Message) error { return nil }); err != nil {
		t.Errorf("of nftables it says %v", err)
	}
}
