package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestSharing(t *testing.T) {
	s := Service{Ports: []ServicePort{{Protocol: UDP, Port: 53}, {Protocol: TCP, Port: 53}, {Protocol: TCP, Port: 22}}}
	if got := FormatSharing(SharingTerms(&s), nil); got != "" {
		t.Errorf("without a key: %q", got)
	}
	first, four, six := Key{Namespace: "a", Name: "first"}, netip.MustParseAddr("192.0.2.7"),
		netip.MustParseAddr("fd00::7")
	for key, want := range map[string]string{
		"web": `p (shared by key "web" on 22/TCP, 53/TCP, 53/UDP; 192.0.2.7 after a/first; fd00::7 after a/first)`,
		`x"; 1.1.1.1 after a/b`: `p (shared by key "x\"; 1.1.1.1 after a/b" on 22/TCP, 53/TCP, 53/UDP; ` +
			`192.0.2.7 after a/first; fd00::7 after a/first)`,
		`x (shared by key y`: `p (shared by key "x (shared by key y" on 22/TCP, 53/TCP, 53/UDP; ` +
			`192.0.2.7 after a/first; fd00::7 after a/first)`,
	} {
		s.Request.Share = key
		terms, after := SharingTerms(&s), map[netip.Addr]Key{four: first, six: first}
		message := "p" + FormatSharing(terms, after)
		if message != want {
			t.Errorf("%s, want %s", message, want)
		}
		if gotTerms, gotAfter := ParseSharing(message); gotTerms != terms || !maps.Equal(gotAfter, after) {
			t.Errorf("%s: parsed as %s, %v", message, gotTerms, gotAfter)
		}
		if gotTerms, gotAfter := ParseSharing("p" + FormatSharing(terms, nil)); gotTerms != terms || len(gotAfter) > 0 {
			t.Errorf("%s alone: parsed as %s, %v", terms, gotTerms, gotAfter)
		}
	}
}

// joined reads all conditions, and what they say of addr.
func joined(addr netip.Addr, holders []*Service) []bool {
	keys, assigned := make([]Key, len(holders)), make([]Assigned, len(holders))
	for i, s := range holders {
		keys[i] = s.Key
		for _, c := range s.Conditions {
			assigned[i] = ReadAssigned(c)
		}
	}
	return Joined(addr, keys, assigned)
}

func TestJoined(t *testing.T) {
	addr := netip.MustParseAddr("192.0.2.7")
	with := func(name string, c ...Condition) *Service {
		for i := range c {
			c[i].Type = ConditionAssigned
		}
		return &Service{Key: Key{Namespace: "a", Name: name}, Conditions: c}
	}
	first := with("first", Condition{Status: true, Message: `192.0.2.7 from pool p (shared by key "k" on 22/TCP)`})
	joins := with("joins", Condition{Status: true,
		Message: `192.0.2.7 from pool p (shared by key "k" on 80/TCP; 192.0.2.7 after a/first)`})
	first2 := with("first", Condition{Status: true,
		Message: `192.0.2.7 from pool p (shared by key "k" on 22/TCP; 192.0.2.7 after a/next)`})
	next := with("next", Condition{Status: true, Message: `192.0.2.7 from pool p (shared by key "k" on 81/TCP)`})
	next2 := with("next", Condition{Status: true,
		Message: `192.0.2.7 from pool p (shared by key "k" on 81/TCP; 192.0.2.7 after a/first)`})
	other := with("other", Condition{Status: true, Message: "192.0.2.8 from pool p"})
	none, none2 := with("none"), with("none2")
	duplicate := with("duplicate", Condition{Reason: ReasonDuplicate, Message: "192.0.2.7 is held by Service a/first"})
	for name, test := range map[string]struct {
		holders []*Service
		want    []bool
	}{
		"alone":                         {[]*Service{joins}, []bool{false}},
		"after the first":               {[]*Service{first, joins}, []bool{false, true}},
		"the next is first":             {[]*Service{next, joins, first2}, []bool{false, true, true}},
		"nobody is first yet":           {[]*Service{next2, joins}, []bool{false, false}},
		"the first is gone":             {[]*Service{joins, none}, []bool{false, true}},
		"written into a status":         {[]*Service{none, first, other}, []bool{true, false, true}},
		"nothing is confirmed":          {[]*Service{none, none2}, []bool{false, false}},
		"by mistake":                    {[]*Service{duplicate, none}, []bool{true, false}},
		"by mistake, and none is right": {[]*Service{duplicate, duplicate}, []bool{true, true}},
	} {
		if got := joined(addr, test.holders); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// BenchmarkJoined has n Services share an address.
func BenchmarkJoined(b *testing.B) {
	addr := netip.MustParseAddr("192.0.2.7")
	for _, n := range []int{10, 100, 1_000} {
		var holders []*Service
		for i := range n {
			holders = append(holders, &Service{Key: Key{Namespace: "a", Name: fmt.Sprint(i)}, Conditions: []Condition{{
				Type: ConditionAssigned, Status: true,
				Message: fmt.Sprintf(`192.0.2.7 from pool p (shared by key "k" on %d/TCP; 192.0.2.7 after a/0)`, i)}}})
		}
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				joined(addr, holders)
			}
		})
	}
}

func FuzzParseSharing(f *testing.F) {
	f.Add(`p (shared by key "web" on 22/TCP; 192.0.2.7 after a/first)`)
	f.Add(` (shared by key ; 1.1.1.1 after a/)`)
	f.Fuzz(func(t *testing.T, message string) {
		terms, after := ParseSharing(message)
		if terms == "" {
			return
		}
		again, keys := ParseSharing(FormatSharing(terms, after))
		if again != terms && !strings.Contains(terms, sharedBy) || !strings.Contains(terms, sharedBy) &&
			!maps.Equal(keys, after) {
			t.Errorf("%q: %q %v, then %q %v", message, terms, after, again, keys)
		}
	})
}

// FuzzReadAssigned checks that whatever the condition Assigned says is read to a limit, and that what the controller
// wrote is what is read, whatever the tenant has for a sharing key and a selector: no words of theirs name an address.
func FuzzReadAssigned(f *testing.F) {
	f.Add(true, "", `192.0.2.7 from pool p (shared by key "k" on 80/TCP; 192.0.2.7 after a/first)`, "web", "a=b")
	f.Add(false, string(ReasonDuplicate), "192.0.2.7 is held by Service a/first; it also holds 192.0.2.8",
		`x" on 80/TCP; 192.0.2.9 after a/b)`, `"; it also holds 192.0.2.9`)
	f.Add(false, "", "keeps 192.0.2.7", "\\", "192.0.2.9 from pool p, 192.0.2.9 from pool p")
	f.Add(true, "", "", strings.Repeat(`"`, 200), strings.Repeat("\xff", 200))
	f.Fuzz(func(t *testing.T, status bool, reason, message, share, selector string) {
		held, free := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("192.0.2.8")
		a := ReadAssigned(Condition{Status: status, Reason: Reason(reason), Message: message})
		if len(a.Confirmed) > 2*MaxAddresses || len(a.After) > len(message)/len(":: after /") ||
			a.Duplicate != (reason == string(ReasonDuplicate)) {
			t.Errorf("%q is read as %+v", message, a)
		}
		holders := []Key{{Namespace: "a", Name: "first"}, {Namespace: "a", Name: "joins"}}
		if Joined(held, holders[:1], []Assigned{a})[0] {
			t.Errorf("%q: a Service alone has joined", message)
		}
		s := Service{Ports: []ServicePort{{Protocol: TCP, Port: 80}}, ExternalPolicy: Local,
			Request: Request{Share: share, Selector: selector}}
		after := map[netip.Addr]Key{held: holders[0]}
		if share == "" {
			after = nil
		}
		written := Condition{Status: true, Message: "192.0.2.7" + FromPool + "p" + FormatSharing(SharingTerms(&s), after)}
		got := ReadAssigned(written)
		if !slices.Equal(got.Confirmed, []netip.Addr{held}) || !maps.Equal(got.After, after) || got.Duplicate {
			t.Errorf("%q is read as %+v", written.Message, got)
		}
		shown := []Ingress{{Addr: held}}
		if Intrudes(written, s.Ports, shown) != IntrudesNot ||
			Intrudes(written, s.Ports, append(shown, Ingress{Addr: free})) != Unconfirmed ||
			share != "" && Intrudes(written, []ServicePort{{Protocol: TCP, Port: 81}}, shown) != ChangedAfterOthers {
			t.Errorf("%q: intrudes otherwise than the controller wrote", written.Message)
		}
	})
}

// A tenant who finds two lists of ports with one hash could change from one to the other unseen.
func TestContract11TermsAreShortenedByAStrongHash(t *testing.T) {
	s := Service{Request: Request{Share: "k"}}
	for port := range uint16(30) {
		s.Ports = append(s.Ports, ServicePort{Protocol: TCP, Port: 1000 + port})
	}
	const begins = `"k" on 1000/TCP, 1001/TCP, 1002/TCP, 1003/TCP, 1004/TCP... `
	terms := SharingTerms(&s)
	if want := begins + "8cdd5a530988853721060f768d3fb84d"; terms != want {
		t.Errorf("%q, want %q", terms, want)
	}
	for message, want := range map[string]Intrusion{terms: IntrudesNot, begins + "0": Changed} {
		if got := Intrudes(Condition{Status: true, Message: "p" + FormatSharing(message, nil)}, s.Ports, nil); got != want {
			t.Errorf("%s: intrudes %v", message, got)
		}
	}
}

func TestIntrudes(t *testing.T) {
	ports := []ServicePort{{Protocol: TCP, Port: 53}, {Protocol: TCP, Port: 22}}
	s := Service{Ports: ports, Request: Request{Share: `x" on 80/TCP, policy `}, ExternalPolicy: Local}
	agreed := Condition{Message: "p" + FormatSharing(SharingTerms(&s), nil)}
	s.Unkept.Ports = 3
	more := Condition{Message: "p" + FormatSharing(SharingTerms(&s), nil)}
	joined := Condition{Message: "p" + FormatSharing(SharingTerms(&s), map[netip.Addr]Key{netip.IPv4Unspecified(): {}})}
	vip, other := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("192.0.2.8")
	holds := Condition{Status: true, Message: "192.0.2.7 from pool p"}
	for name, test := range map[string]struct {
		c     Condition
		ports []ServicePort
		shown []Ingress
		want  Intrusion
	}{
		"as agreed":    {c: agreed, ports: ports},
		"another port": {agreed, []ServicePort{{Protocol: TCP, Port: 53}, {Protocol: TCP, Port: 23}}, nil, Changed},
		"one port more": {agreed, append(slices.Clone(ports), ServicePort{Protocol: TCP, Port: 23}), nil,
			Changed},
		"one port less, of one that joined": {joined, ports[:1], nil, ChangedAfterOthers},
		"as agreed, of one that joined":     {c: joined, ports: ports},
		"more ports than are kept":          {more, ports, nil, IntrudesNot},
		"more, and another":                 {more, ports[:1], nil, Changed},
		"shares none":                       {c: Condition{Message: "10.0.0.0 from pool p"}, ports: ports},
		"by mistake":                        {Condition{Reason: ReasonDuplicate}, ports, nil, Unconfirmed},
		"confirmed":                         {holds, ports, []Ingress{{Addr: vip}}, IntrudesNot},
		"one more than confirmed":           {holds, ports, []Ingress{{Addr: vip}, {Addr: other}}, Unconfirmed},
		"no condition":                      {Condition{}, ports, []Ingress{{Addr: vip}}, Unconfirmed},
		"neither condition nor IP":          {c: Condition{}, ports: ports},
	} {
		if got := Intrudes(test.c, test.ports, test.shown); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
