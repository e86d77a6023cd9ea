package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestServiceRules(t *testing.T) {
	got := serviceRules(`*nat
:LF-SVC-AAA - [0:0]
-A LF-SEP-CCC -j RETURN
-A LF-SERVICES -d 10.0.0.1/32 -p tcp -m comment --comment "default/x: cluster IP" -m tcp --dport 80 -j LF-SVC-AAA
-A LF-SERVICES -d 10.0.0.2/32 -p tcp -m comment --comment "default/y: cluster IP" -m tcp --dport 80 -j LF-SVC-BBB
-A LF-SVC-AAA -m comment --comment plain -j LF-SEP-CCC
-A LF-SVC-AAA -j RETURN
COMMIT
`, "AAA", "CCC")
	want := []rule{
		{"LF-SERVICES", "-d 10.0.0.1/32 -p tcp -m tcp --dport 80 -j LF-SVC-AAA", "# default/x: cluster IP"},
		{"LF-SVC-AAA", "-j LF-SEP-CCC", "# plain"},
		{"LF-SVC-AAA", "-j RETURN", ""},
		{"LF-SEP-CCC", "-j RETURN", ""},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(rule{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPrinter(t *testing.T) {
	var b strings.Builder
	p := newPrinter(&b)
	p.table([][]string{{"A", "LONG HEADING", "C"}, {"value", "ü", "x"}})
	want := "  A       LONG HEADING   C\n  value   ü              x\n"
	if b.String() != want {
		t.Errorf("table\n%q, want\n%q", b.String(), want)
	}
	if err := p.promise(false, "%d of %d", 1, 2); err == nil || err.Error() != "not as promised: 1 of 2" {
		t.Errorf("%v", err)
	}
}

func TestCommandLine(t *testing.T) {
	for _, args := range [][]string{{"nonsense"}, {"up", "--nonsense"}, {"pod", "{"}, {"tool", "nonsense"}} {
		if err := run(t.Context(), args, &strings.Builder{}); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}
