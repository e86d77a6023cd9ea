package wire

import "testing"

func FuzzDecodeHello(f *testing.F) {
	f.Add([]byte(`{"ports":{"IPv4":7484,"IPv6":7484},"connections":3}`))
	f.Add([]byte(`{"ports":{"IPv6":7484},"flows":[{"client":"[2001:db8::9]:5","at":"[2001:db8::1]:7484"}]}`))
	f.Add([]byte(`{"leaving":true}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		h, err := DecodeHello(line)
		if err != nil {
			return
		}
		if h.Connections < 0 || len(h.Ports) > 2 {
			t.Errorf("%+v", h)
		}
	})
}
