package expr

import "testing"

// FuzzDecode checks that anything may be read.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add(Encode(Join(Drop(), Goto("x"), In("set"), IsProtocol(CmpOpEq, 6), Refuse(1, 0), List{&Masq{}, &Redir{},
		&Limit{Rate: 1}, &Numgen{Modulus: 4}, &Hash{Length: 4, Modulus: 3}, &DNAT{RegAddr: 1, RegPort: 2},
		&FlowOffload{Flowtable: "x"}})))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, e := range Decode(b) {
			if e == nil {
				t.Errorf("%x has an expression that is nothing", b)
			}
		}
	})
}
