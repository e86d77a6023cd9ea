package counters

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Kernel is this node's. It is not safe for concurrent use.
type Kernel struct{ conn *nfnetlink.Conn }

// Open opens the way to the kernel, in the network namespace of the calling thread.
func Open() (Kernel, error) {
	conn, err := nfnetlink.Open()
	return Kernel{conn}, err
}

// Close closes it.
func (k Kernel) Close() { k.conn.Close() }

// Cleanup removes what is ours.
func Cleanup() error {
	k, err := Open()
	if err != nil {
		return err
	}
	defer k.Close()
	return nft.Remove(k.conn, TableName)
}

// maxElements is how many elements a transaction adds or removes: the kernel works through them in a
// few milliseconds.
const maxElements = 1500

// prepare makes the table of a family have our sets and rules, and exactly the elements of these
// places. What elements have counted that are there already stays; added are those that were not, also
// with an error.
func (k Kernel) prepare(family lb.Family, want map[place]bool) (added [kinds][]place, err error) {
	t := table{family}
	l := nft.Listing{Conn: k.conn, Table: t.nft()}
	var sets map[string]nft.Shape
	var chains map[string]nft.Chain
	err = nfnetlink.Complete(func() (err error) {
		sets, chains = nil, nil
		exists, err := l.Exists()
		if err != nil || !exists {
			return err
		}
		if sets, err = l.Sets(); err == nil {
			chains, err = l.Chains()
		}
		return err
	})
	if err != nil {
		return added, fmt.Errorf("read the table %s: %w", TableName, err)
	}
	b := nft.NewBatch(t.nft())
	if foreign(t, sets) {
		b.RemoveTable()
		sets, chains = nil, nil
	}
	b.AddTable()
	for _, s := range t.sets() {
		b.AddSet(s)
	}
	right := len(chains) == len(t.chains())
	for _, c := range t.chains() {
		var rules []string
		for _, r := range c.rules {
			rules = append(rules, r.UserData())
		}
		have, there := chains[c.name]
		right = right && there && have.Hook == c.hook && slices.Equal(have.Rules, rules)
	}
	if !right {
		b.RemoveRules("")
		for name := range chains {
			b.RemoveChain(name)
		}
		for _, c := range t.chains() {
			b.AddChain(c.name, c.hook)
		}
		for _, c := range t.chains() {
			for _, r := range c.rules {
				b.AddRule(c.name, r)
			}
		}
	}
	if err := b.Commit(k.conn); err != nil {
		return added, fmt.Errorf("write the table %s: %w", TableName, err)
	}
	return k.align(t, len(sets) > 0, want)
}

// foreign reports whether there are sets with other shapes than ours, or other names.
func foreign(t table, sets map[string]nft.Shape) bool {
	if len(sets) == 0 {
		return false
	}
	ours := map[string]nft.Shape{}
	for _, s := range t.sets() {
		ours[s.Name] = s.Shape()
	}
	return !maps.Equal(ours, sets)
}

// align adds and removes elements; without filled the sets are known to be empty.
func (k Kernel) align(t table, filled bool, want map[place]bool) (added [kinds][]place, err error) {
	e := new(edit)
	for kind := range kinds {
		have := map[place]bool{}
		for _, nodePort := range []bool{false, true} {
			if !filled {
				break
			}
			err := nfnetlink.Complete(func() error {
				return nft.Listing{Conn: k.conn, Table: t.nft()}.Elements(setName(kind, nodePort), func(el nft.Element) {
					if p, ok := placeOf(t.family, el.Key, nodePort); ok {
						have[p] = true
					}
				})
			})
			if err != nil {
				return e.add, fmt.Errorf("list the set %s: %w", setName(kind, nodePort), err)
			}
		}
		for p := range have {
			if !want[p] {
				e.remove[kind] = append(e.remove[kind], p)
			}
		}
		for p := range want {
			if !have[p] {
				e.add[kind] = append(e.add[kind], p)
			}
		}
	}
	return e.add, k.edit(t.family, e)
}

// edit is what to add and remove, by kind.
type edit struct{ add, remove [kinds][]place }

// all adds or removes a place in all kinds.
func (e *edit) all(p place, add bool) {
	for kind := range kinds {
		if add {
			e.add[kind] = append(e.add[kind], p)
		} else {
			e.remove[kind] = append(e.remove[kind], p)
		}
	}
}

// edit changes elements. The four elements of a place come and go in one transaction, if all of them
// do.
func (k Kernel) edit(family lb.Family, e *edit) error {
	for _, part := range []struct {
		places [kinds][]place
		write  func(*nft.Batch, string, func(*nft.Element) bool)
	}{{e.remove, (*nft.Batch).RemoveElements}, {e.add, (*nft.Batch).AddElements}} {
		most := 0
		for _, places := range part.places {
			most = max(most, len(places))
		}
		const step = maxElements / int(kinds)
		for first := 0; first < most; first += step {
			b := nft.NewBatch(table{family}.nft())
			for k := range kinds {
				places := part.places[k]
				places = places[min(first, len(places)):min(first+step, len(places))]
				for _, nodePort := range []bool{false, true} {
					part.write(b, setName(k, nodePort), elements(places, nodePort))
				}
			}
			if err := b.Commit(k.conn); err != nil {
				return fmt.Errorf("write the table %s: %w", TableName, err)
			}
		}
	}
	return nil
}

// elements passes on the keys of those places that are node ports, or are not.
func elements(places []place, nodePort bool) func(*nft.Element) bool {
	return func(next *nft.Element) bool {
		for len(places) > 0 {
			p := places[0]
			if places = places[1:]; p.addr.IsValid() != nodePort {
				next.Key = p.appendKey(next.Key[:0])
				return true
			}
		}
		return false
	}
}

// fewEnough is for how many places the sets are listed as a whole. Listing those of 30,000 is six times
// faster than asking for each, but its time grows with the square of their number.
const fewEnough = 1 << 16

// read passes on what was counted at some places, attempts before connections. The error wraps
// unix.ENOENT if elements are not there.
func (k Kernel) read(family lb.Family, places []place, each func(place, kind, nft.Count)) error {
	l := nft.Listing{Conn: k.conn, Table: table{family}.nft()}
	for _, nodePort := range []bool{false, true} {
		var at []place
		var keys [][]byte
		for _, p := range places {
			if p.addr.IsValid() != nodePort {
				at, keys = append(at, p), append(keys, p.appendKey(nil))
			}
		}
		for kind := range kinds {
			err := l.Counts(setName(kind, nodePort), keys, func(i int, c nft.Count) { each(at[i], kind, c) })
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// readAll is read for all places. Those that the kernel does not list, as elements came or went
// meanwhile, it leaves out.
func (k Kernel) readAll(family lb.Family, places []place, each func(place, kind, nft.Count)) error {
	if len(places) > fewEnough {
		return k.read(family, places, each)
	}
	l := nft.Listing{Conn: k.conn, Table: table{family}.nft()}
	for kind := range kinds {
		for _, nodePort := range []bool{false, true} {
			err := l.Elements(setName(kind, nodePort), func(e nft.Element) {
				if p, ok := placeOf(family, e.Key, nodePort); ok {
					each(p, kind, e.Count)
				}
			})
			if err != nil && !errors.Is(err, nfnetlink.ErrInterrupted) {
				return err
			}
		}
	}
	return nil
}
