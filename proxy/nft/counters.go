package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Count is what an element of a counted set has counted.
type Count struct{ Packets, Bytes uint64 }

// maxAsked is how many elements one request names: their answers fit into the socket's buffer also
// where the kernel gives only the default of that.
const maxAsked = 128

// Counts passes on what the elements with these keys have counted, in the order of keys. It asks for
// each by its key, as a listing takes a time that grows with the square of what the set holds. The
// error wraps unix.ENOENT if the table, the set or an element is not there.
func (l Listing) Counts(set string, keys [][]byte, each func(place int, c Count)) error {
	for first := 0; first < len(keys); first += maxAsked {
		asked := keys[first:min(first+maxAsked, len(keys))]
		var m nfnetlink.Messages
		m.Add(subsystem<<8|unix.NFT_MSG_GETSETELEM, 0, Family(l.Table.Family), "read counters of "+set, func() {
			m.Text(unix.NFTA_SET_ELEM_LIST_TABLE, l.Table.Name)
			m.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
			list := m.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
			for _, key := range asked {
				Element{Key: key}.append(&m.Attributes)
			}
			m.Close(list)
		})
		next := 0
		err := l.Conn.Request(&m, func(msg nfnetlink.Message) {
			elem := nfnetlink.Get(msg.Attributes(), unix.NFTA_SET_ELEM_LIST_ELEMENTS, unix.NFTA_LIST_ELEM)
			key := nfnetlink.Get(elem, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)
			if next < len(asked) && bytes.Equal(key, asked[next]) {
				each(first+next, readCount(nfnetlink.Get(elem, unix.NFTA_SET_ELEM_EXPR, unix.NFTA_EXPR_DATA)))
				next++
			}
		})
		if err != nil {
			return err
		}
		if next < len(asked) {
			return fmt.Errorf("read counters of %s: %d answers for %d elements", set, next, len(asked))
		}
	}
	return nil
}

func readCount(b []byte) (c Count) {
	number := func(kind uint16) uint64 {
		if data := nfnetlink.Get(b, kind); len(data) == 8 {
			return binary.BigEndian.Uint64(data)
		}
		return 0
	}
	return Count{Packets: number(unix.NFTA_COUNTER_PACKETS), Bytes: number(unix.NFTA_COUNTER_BYTES)}
}
