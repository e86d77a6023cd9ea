package nfnetlink

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/nstest"
)

const subsystem = unix.NFNL_SUBSYS_NFTABLES

// addTable is a transaction that adds a table, whose name must be new with NLM_F_EXCL among flags.
func addTable(name string, flags uint16) *Messages {
	var m Messages
	m.Begin(subsystem)
	m.Add(subsystem<<8|unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|flags, unix.NFPROTO_IPV4, "add table "+name,
		func() { m.Text(unix.NFTA_TABLE_NAME, name) })
	m.End(subsystem)
	return &m
}

func open(t *testing.T, ns *nstest.NS) *Conn {
	t.Helper()
	var c *Conn
	ns.Do(t, func() (err error) {
		c, err = Open()
		return err
	})
	t.Cleanup(c.Close)
	return c
}

func tables(t *testing.T, c *Conn) (names []string) {
	t.Helper()
	var m Messages
	m.Add(subsystem<<8|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, unix.NFPROTO_IPV4, "list the tables", func() {})
	if err := c.Dump(&m, func(m Message) error {
		names = append(names, GetText(m.Attributes(), unix.NFTA_TABLE_NAME))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return names
}

// TestTransact checks that a transaction is confirmed when it has happened, and that a refusal
// names the message that the kernel refused, and leaves nothing behind.
func TestTransact(t *testing.T) {
	c := open(t, nstest.New(t))
	if err := c.Transact(addTable("one", 0)); err != nil {
		t.Fatal(err)
	}
	m := addTable("two", 0)
	var both Messages
	both.Begin(subsystem)
	for _, name := range []string{"three", "one"} {
		both.Add(subsystem<<8|unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.NFPROTO_IPV4, "add table "+name,
			func() { both.Text(unix.NFTA_TABLE_NAME, name) })
	}
	both.End(subsystem)
	err := c.Transact(&both)
	if !errors.Is(err, unix.EEXIST) || err.Error() != "add table one: file exists" {
		t.Errorf("error %v, want that table one exists", err)
	}
	if err := c.Transact(m); err != nil { // the refusal leaves no answer behind
		t.Error(err)
	}
	if got := tables(t, c); len(got) != 2 || got[0] != "one" || got[1] != "two" {
		t.Errorf("tables %q, want one and two", got)
	}
}

// TestWatch checks that changes of others are seen, and our own are not.
func TestWatch(t *testing.T) {
	ns := nstest.New(t)
	own, other := open(t, ns), open(t, ns)
	var events *Events
	ns.Do(t, func() (err error) {
		events, err = Subscribe(unix.NFNLGRP_NFTABLES, own.Port())
		return err
	})
	defer events.Close()
	ctx, cancel := context.WithCancel(t.Context())
	seen, done := make(chan string, 10), make(chan error)
	var name string
	go func() {
		done <- events.Watch(ctx, func(m Message) bool {
			if m.Kind == subsystem<<8|unix.NFT_MSG_NEWTABLE {
				name = GetText(m.Attributes(), unix.NFTA_TABLE_NAME)
				return true
			}
			return false
		}, func() { seen <- name })
	}()
	for _, test := range []struct {
		by   *Conn
		name string
	}{{own, "ours"}, {other, "theirs"}} {
		if err := test.by.Transact(addTable(test.name, 0)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case name := <-seen:
		if name != "theirs" {
			t.Errorf("saw a change of table %s", name)
		}
	case <-time.After(time.Minute):
		t.Error("the change of another socket was not seen")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestComplete checks that an interrupted listing is repeated, for a while, and others are not.
func TestComplete(t *testing.T) {
	other := errors.New("no luck")
	for _, test := range []struct {
		ends  []error
		calls int
		err   error
	}{
		{[]error{nil}, 1, nil},
		{[]error{ErrInterrupted, ErrInterrupted, nil}, 3, nil},
		{[]error{ErrInterrupted, other}, 2, other},
		{nil, tries, ErrInterrupted},
	} {
		calls := 0
		err := Complete(func() error {
			if calls++; calls <= len(test.ends) {
				return test.ends[calls-1]
			}
			return ErrInterrupted
		})
		if calls != test.calls || !errors.Is(err, test.err) {
			t.Errorf("ends %v: %d calls, error %v", test.ends, calls, err)
		}
	}
}

func TestErrorsSayWhatTheKernelSaid(t *testing.T) {
	m := Message{Kind: unix.NLMSG_ERROR, Data: []byte{0xef, 0xff, 0xff, 0xff}} // -17
	if err := m.failure(); !errors.Is(err, unix.EEXIST) {
		t.Error(err)
	}
	if err := (Message{Data: make([]byte, 4)}).failure(); err != nil {
		t.Error(err)
	}
}

// FuzzAttributes checks that what was written is read back, and that anything may be read.
func FuzzAttributes(f *testing.F) {
	f.Add(uint16(1), []byte("x"), "name", uint32(7))
	f.Fuzz(func(t *testing.T, kind uint16, data []byte, s string, n uint32) {
		kind &^= unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
		if len(data) < 60000 && len(s) < 60000 {
			var a Attributes
			a.Nested(kind, func() {
				a.Bytes(1, data)
				a.Text(2, s)
				a.Number(3, n)
			})
			if len(a) < 65000 {
				got, ok := GetNumber(a, kind, 3)
				if !ok || got != n || GetText(a, kind, 2) != s || !bytes.Equal(Get(a, kind, 1), data) {
					t.Errorf("%q, %q and %d of kind %d came back otherwise from %x", data, s, n, kind, a)
				}
			}
		}
		sum := 0
		for _, part := range All(data) {
			sum += len(part)
		}
		if sum > len(data) {
			t.Errorf("%d bytes were read from %d", sum, len(data))
		}
	})
}

// FuzzSplit checks that whatever a datagram holds is passed on within its bounds.
func FuzzSplit(f *testing.F) {
	m := addTable("x", 0)
	m.number(5, 1)
	f.Add([]byte(m.Attributes))
	f.Add(append([]byte(m.Attributes), 1))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		total := 0
		_ = split(b, func(m Message) error {
			total += unix.NLMSG_HDRLEN + len(m.Data)
			if err := m.failure(); err == nil && (len(m.Data) < 4 || binary.NativeEndian.Uint32(m.Data) != 0) {
				t.Errorf("%x was read as an acknowledgement", m.Data)
			}
			return nil
		})
		if total > len(b) {
			t.Errorf("messages of %d bytes in a datagram of %d", total, len(b))
		}
	})
}
