package wire

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// TestVersion fails if one end may say what the other one of the same version does not know.
func TestVersion(t *testing.T) {
	says := fmt.Sprintf("version %d\nschedulers %s\nproxy\n%srelay\n%s", Version, plan.Schedulers,
		fields(reflect.TypeFor[Message](), " "), fields(reflect.TypeFor[Hello](), " "))
	const file = "testdata/version.txt"
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if says != string(want) {
		t.Errorf("%s is\n%s\nIf an end of the version before gets wrong what is new, count Version up. Then write this there:"+
			"\n%s", file, want, says)
	}
}

// fields lists the fields of a type that are written as JSON, and the fields of these.
func fields(of reflect.Type, indent string) string {
	switch {
	case of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer || of.Kind() == reflect.Map:
		return fields(of.Elem(), indent)
	case of.Kind() != reflect.Struct || of.PkgPath() == "net/netip":
		return ""
	}
	var all strings.Builder
	for f := range of.Fields() {
		fmt.Fprintf(&all, "%s%s %s\n%s", indent, f.Tag.Get("json"), f.Type, fields(f.Type, indent+" "))
	}
	return all.String()
}

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
