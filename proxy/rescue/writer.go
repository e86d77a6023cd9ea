package rescue

import (
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// maxBatch is how many bytes a transaction has at most, or not many more: the kernel takes one only
// if it fits into the buffer of the socket. The default of that is 208 KiB.
const maxBatch = 128 << 10

// chunk is how many elements are added to a transaction before its size is looked at again.
const chunk = 1000

// writer writes to one table, in as many transactions as it takes.
type writer struct {
	*nft.Batch
	conn  *nfnetlink.Conn
	table nft.Table
	err   error // the first, after which nothing is written any more
	whole bool  // until this is false again, all is one transaction, however large
}

func (k Kernel) writer(family lb.Family) *writer {
	table := headerOf(family).table()
	return &writer{Batch: nft.NewBatch(table), conn: k.conn, table: table}
}

// spill makes a transaction of what there is if it is large.
func (w *writer) spill() {
	if w.Size() > maxBatch && !w.whole {
		_ = w.commit()
	}
}

// replace makes a chain have these rules, in one transaction: in another one than what there is if
// that would be large.
func (w *writer) replace(chain string, hook nft.Hook, rules []nft.Rule) {
	b := nft.NewBatch(w.table)
	replace(b, chain, hook, rules)
	if w.Size()+b.Size() > maxBatch && !w.whole {
		_ = w.commit()
	}
	replace(w.Batch, chain, hook, rules)
}

func (w *writer) commit() error {
	if w.err == nil {
		w.err = w.Commit(w.conn)
	}
	w.Batch = nft.NewBatch(w.table)
	return w.err
}

// fill adds and removes the keys of a set.
func (w *writer) fill(set nft.Set, add, remove []string) {
	for keys := range slices.Chunk(add, chunk) {
		w.AddElements(set.Name, nft.Keys(keys...))
		w.spill()
	}
	for keys := range slices.Chunk(remove, chunk) {
		w.RemoveElements(set.Name, nft.Keys(keys...))
		w.spill()
	}
}
