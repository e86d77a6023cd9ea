package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

func open(t *testing.T, ns *nstest.NS) *nfnetlink.Conn {
	t.Helper()
	var c *nfnetlink.Conn
	ns.Do(t, func() (err error) {
		c, err = nfnetlink.Open()
		return err
	})
	t.Cleanup(c.Close)
	return c
}

// TestTableReadsBack checks that a table that was written is what is read, and what nft prints, and
// that parts of it can be removed.
func TestTableReadsBack(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		ns := nstest.New(t)
		c := open(t, ns)
		table := Table{Family: family, Name: "test"}
		l := Listing{c, table}
		if exists, err := l.Exists(); exists || err != nil {
			t.Fatalf("exists %v, error %v", exists, err)
		}
		hook := Hook{"filter", unix.NF_INET_PRE_ROUTING, -150}
		port := Set{Name: "ports", KeyType: TypePort, KeyLength: 2, Size: 100000}
		rules := []Rule{
			{Comment: "counted", Exprs: expr.Join(expr.List{&expr.Counter{}}, expr.Jump("other"))},
			{Exprs: expr.Join(expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_TCP),
				expr.List{expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, 2, 2)}, expr.In("ports"), expr.Drop())},
		}
		var all []string
		for i := range 20000 { // more than one message holds
			all = append(all, string([]byte{byte(i >> 8), byte(i)}))
		}
		b := NewBatch(table)
		b.AddTable()
		b.AddSet(port)
		b.AddChain("hooked", hook)
		b.AddChain("other", Hook{})
		for _, r := range rules {
			b.AddRule("hooked", r)
		}
		b.AddElements("ports", Keys(all...))
		if err := b.Commit(c); err != nil {
			t.Fatal(err)
		}
		sets, err := l.Sets()
		if err != nil || sets["ports"] != port.Shape() || len(sets) != 1 {
			t.Errorf("sets %+v, error %v", sets, err)
		}
		chains, err := l.Chains()
		if err != nil || len(chains) != 2 || chains["hooked"].Hook != hook || chains["other"].Hook != (Hook{}) ||
			!slices.Equal(chains["hooked"].Rules, []string{rules[0].UserData(), rules[1].UserData()}) {
			t.Errorf("chains %+v, error %v", chains, err)
		}
		var found []string
		err = l.Elements("ports", func(e Element) { found = append(found, string(e.Key)) })
		slices.Sort(found)
		if err != nil || !slices.Equal(found, all) {
			t.Errorf("%d elements, want %d; error %v", len(found), len(all), err)
		}
		text := ns.Run(t, "nft", "list", "chain", map[lb.Family]string{lb.IPv4: "ip", lb.IPv6: "ip6"}[family], "test",
			"hooked")
		for _, want := range []string{"prerouting priority mangle", `jump other comment "counted"`, "tcp dport @ports drop"} {
			if !strings.Contains(text, want) {
				t.Errorf("nft does not print %q:\n%s", want, text)
			}
		}
		b = NewBatch(table)
		b.RemoveElements("ports", Keys(all[1:]...))
		b.RemoveRules("hooked")
		b.RemoveChain("other")
		if err := b.Commit(c); err != nil {
			t.Fatal(err)
		}
		if chains, err = l.Chains(); err != nil || len(chains) != 1 || len(chains["hooked"].Rules) != 0 {
			t.Errorf("chains %+v, error %v", chains, err)
		}
		b = NewBatch(table)
		b.RemoveTable()
		if exists, err := l.Exists(); err != nil || !exists || b.Commit(c) != nil {
			t.Errorf("exists %v, error %v", exists, err)
		}
	}
}

// TestRemove checks that the tables of a name go, of both families and also where they are not
// there, and that others stay.
func TestRemove(t *testing.T) {
	ns := nstest.New(t)
	c := open(t, ns)
	for _, table := range []Table{{Family: lb.IPv4, Name: "ours"}, {Family: lb.IPv6, Name: "ours"},
		{Family: lb.IPv4, Name: "theirs"}} {
		b := NewBatch(table)
		b.AddTable()
		b.AddSet(Set{Name: "ports", KeyType: TypePort, KeyLength: 2})
		b.AddChain("in", Hook{"filter", unix.NF_INET_PRE_ROUTING, -150})
		b.AddChain("after", Hook{"filter", unix.NF_INET_POST_ROUTING, 0})
		b.AddChain("other", Hook{})
		b.AddRule("in", Rule{Exprs: expr.Jump("other")})
		b.AddRule("other", Rule{Exprs: expr.Join(expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_TCP),
			expr.List{expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, 2, 2)}, expr.In("ports"), expr.Drop())})
		if err := b.Commit(c); err != nil {
			t.Fatal(err)
		}
	}
	theirs := ns.Run(t, "nft", "list", "table", "ip", "theirs")
	for range 2 {
		if err := Remove(c, "ours"); err != nil {
			t.Error(err)
		}
		if left := ns.Run(t, "nft", "list", "ruleset"); left != theirs {
			t.Errorf("left:\n%swant:\n%s", left, theirs)
		}
	}
}

// TestCountersAreRead checks that packets through a chain are counted, and found in its listing.
func TestCountersAreRead(t *testing.T) {
	ns := nstest.New(t)
	c := open(t, ns)
	table := Table{Family: lb.IPv4, Name: "test"}
	b := NewBatch(table)
	b.AddTable()
	b.AddChain("out", Hook{"filter", unix.NF_INET_LOCAL_OUT, 0})
	b.AddRule("out", Rule{Exprs: expr.Join(expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_ICMP),
		expr.List{&expr.Counter{}})})
	if err := b.Commit(c); err != nil {
		t.Fatal(err)
	}
	if !ns.Ping(t, netip.MustParseAddr("127.0.0.1"), 5*time.Second) {
		t.Fatal("no answer")
	}
	chains, err := Listing{c, table}.Chains()
	if n := chains["out"].Packets; err != nil || n == 0 || n%2 != 0 { // requests and answers
		t.Errorf("%d packets, error %v", n, err)
	}
}

// TestRefusalNamesTheObject checks that an error says which change the kernel has refused.
func TestRefusalNamesTheObject(t *testing.T) {
	c := open(t, nstest.New(t))
	table := Table{Family: lb.IPv4, Name: "test"}
	for about, change := range map[string]func(*Batch){
		"add to nowhere":              func(b *Batch) { b.AddElements("nowhere", Keys("x")) },
		"remove from nowhere":         func(b *Batch) { b.RemoveElements("nowhere", Keys("x")) },
		"remove set nowhere":          func(b *Batch) { b.RemoveSet("nowhere") },
		"remove chain nowhere":        func(b *Batch) { b.RemoveChain("nowhere") },
		"add a rule to chain nowhere": func(b *Batch) { b.AddRule("nowhere", Rule{Exprs: expr.Drop()}) },
	} {
		b := NewBatch(table)
		b.AddTable()
		change(b)
		if err := b.Commit(c); !errors.Is(err, unix.ENOENT) || !strings.HasPrefix(fmt.Sprint(err), about+": ") {
			t.Errorf("error %v, want one about %q", err, about)
		}
		if exists, err := (Listing{c, table}).Exists(); exists || err != nil {
			t.Fatalf("after %q the table is there: %v, %v", about, exists, err)
		}
	}
}

// FuzzRead checks that whatever a message holds is read without harm.
func FuzzRead(f *testing.F) {
	var a nfnetlink.Attributes
	a.Text(tableName, "test")
	a.Nested(unix.NFTA_CHAIN_HOOK, func() { a.Number(unix.NFTA_HOOK_HOOKNUM, 1) })
	f.Add(uint16(subsystem<<8|unix.NFT_MSG_NEWCHAIN), append([]byte{unix.NFPROTO_IPV4, 0, 0, 0}, a...))
	f.Add(uint16(0), []byte{})
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		m := nfnetlink.Message{Kind: kind, Data: data}
		table, set, ok := Changed(m)
		if len(table.Name)+len(set) > len(data) || ok && table.Family == "" {
			t.Errorf("read %+v and %q from %x", table, set, data)
		}
		readShape(data)
		readHook(data)
		readCounters(data)
	})
}
