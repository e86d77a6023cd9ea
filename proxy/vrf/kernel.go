package vrf

import (
	"errors"
	"fmt"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Priority is that of our routing rules: ahead of the kernel's for VRFs (1000).
const Priority = 990

// Kernel is this node's. It is not safe for concurrent use.
type Kernel struct {
	conn  *nfnetlink.Conn
	rules links.MarkRules
	marks Marks
}

// Open opens the way to the kernel, in the network namespace of the calling thread.
func Open(marks Marks) (*Kernel, error) {
	rules, err := links.OpenMarkRules(Priority)
	if err != nil {
		return nil, err
	}
	conn, err := nfnetlink.Open()
	if err != nil {
		rules.Close()
		return nil, err
	}
	return &Kernel{conn, rules, marks}, nil
}

// Close closes it. The rules stay.
func (k *Kernel) Close() {
	k.conn.Close()
	k.rules.Close()
}

// missingError is why a rule that delivers is known not to be in the kernel.
type missingError struct{ error }

func (e missingError) Unwrap() error { return e.error }

// set makes the rules of a family as they shall be. Routing rules come first and go last: a mark leads nowhere without
// them. left are VRFs without a mark. The error holds a missingError if rules that were missing could not be added.
func (k *Kernel) set(family lb.Family, vrfs []lb.Interface, narrow bool) (left []string, err error) {
	have, err := k.rules.List(family)
	if err != nil {
		return nil, err
	}
	all, left := k.marks.assign(vrfs, have)
	want := k.marks.rules(all, narrow)
	for _, rule := range want {
		if !slices.Contains(have, rule) {
			if err := k.rules.Add(family, rule); err != nil {
				return left, missingError{err}
			}
		}
	}
	if err := k.setChain(family, k.marks.chain(all)); err != nil {
		return left, fmt.Errorf("table %s: %w", TableName, err)
	}
	var errs []error
	for _, rule := range have {
		if !slices.Contains(want, rule) {
			errs = append(errs, k.rules.Remove(family, rule))
		}
	}
	return left, errors.Join(errs...)
}

func (k *Kernel) setChain(family lb.Family, rules []nft.Rule) error {
	l := nft.Listing{Conn: k.conn, Table: table(family)}
	exists, chains := false, map[string]nft.Chain{}
	err := nfnetlink.Complete(func() (err error) {
		if exists, err = l.Exists(); err == nil && exists {
			chains, err = l.Chains()
		}
		return err
	})
	if err != nil {
		return err
	}
	c := chains[chainName]
	if exists && c.Hook == hook && slices.Equal(c.Rules, nft.UserData(rules)) || !exists && len(rules) == 0 {
		return nil
	}
	b := nft.NewBatch(table(family))
	if exists {
		b.RemoveTable()
	}
	if len(rules) > 0 {
		b.AddTable()
		b.AddChain(chainName, hook)
		for _, r := range rules {
			b.AddRule(chainName, r)
		}
	}
	if err := b.Commit(k.conn); err != nil {
		return missingError{err}
	}
	return nil
}

// Cleanup removes what is ours, whichever marks it is for.
func Cleanup() error {
	k, err := Open(DefaultMarks)
	if err != nil {
		return err
	}
	defer k.Close()
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		_, err := k.set(family, nil, false)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
