package chaos

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/flat"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

// Each cycle of a soak ends as it began: what is added is removed, what is unready is ready again.
func TestSoakRoundsEndAsTheyBegin(t *testing.T) {
	ids := map[int]bool{}
	for number := range 20 {
		there, ready := map[string]bool{}, true
		rounds := soakRounds(number, Cast())
		if len(rounds) != 2 || !rounds[0].Calm || rounds[1].Calm {
			t.Fatalf("cycle %d: %+v", number, rounds)
		}
		for _, r := range rounds {
			for _, e := range r.Events {
				if ids[e.ID] {
					t.Fatalf("two events are #%d", e.ID)
				}
				ids[e.ID] = true
				switch e.Kind {
				case story.AddService:
					there[e.Service] = true
				case story.RemoveService:
					if !there[e.Service] {
						t.Errorf("cycle %d: %s is not there", number, e.Service)
					}
					delete(there, e.Service)
				case story.Unready, story.Ready:
					ready = e.Kind == story.Ready
				}
			}
		}
		if len(there) > 0 || !ready {
			t.Errorf("cycle %d leaves %v, ready %v", number, there, ready)
		}
	}
}

func TestNoteFillsWhatIsMissing(t *testing.T) {
	series := map[figure]*flat.Series{}
	a, b := figure{"a", sockets}, figure{"b", sockets}
	note(series, time.Second, map[figure]float64{a: 1})
	note(series, 2*time.Second, map[figure]float64{a: 2, b: 3})
	note(series, 3*time.Second, map[figure]float64{b: 4})
	for f, want := range map[figure][]float64{a: {1, 2, 0}, b: {0, 3, 4}} {
		if s := series[f]; !slices.Equal(s.Values, want) || len(s.At) != 3 || s.At[2] != 3*time.Second {
			t.Errorf("%s: %+v, want %v", f.of, s, want)
		}
	}
}

func TestCountRules(t *testing.T) {
	got := map[figure]float64{}
	for range 2 { // nodes
		if err := countRules(`{"nftables": [{"metainfo": {"version": "1.0.6"}},
			{"table": {"family": "ip", "name": "landfall", "handle": 1}},
			{"map": {"family": "ip", "name": "ports", "table": "landfall", "elem": [["a", "b"], ["c", "d"]]}},
			{"set": {"family": "ip", "name": "clients", "table": "landfall", "flags": ["timeout"], "elem": ["a"]}},
			{"set": {"family": "ip", "name": "flows-ac1aecb1", "table": "landfall-rescue", "flags": "timeout", "elem": ["a"]}},
			{"set": {"family": "ip", "name": "vips-ac1aecb1", "table": "landfall-rescue", "elem": ["a", "b", "c"]}},
			{"set": {"family": "ip", "name": "vips-ac1aecb2", "table": "landfall-rescue"}},
			{"rule": {"family": "ip", "table": "landfall", "chain": "c", "expr": []}},
			{"rule": {"family": "ip", "table": "filter", "chain": "c", "expr": []}}]}`, got); err != nil {
			t.Fatal(err)
		}
	}
	want := map[figure]float64{{allNodes, elementsOf + "ip landfall ports"}: 4, {allNodes, remembered + "ip landfall clients"}: 2,
		{allNodes, remembered + "ip landfall-rescue flows"}: 2, {allNodes, elementsOf + "ip landfall-rescue vips"}: 6,
		{allNodes, rulesOf + "ip landfall"}: 2}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if countRules("no JSON", got) == nil {
		t.Error("what is no JSON is no error")
	}
}

func TestSum(t *testing.T) {
	const text = `# HELP x_total Requests.
x_total{flow_schema="exempt"} 5
x_total{flow_schema="service-accounts",priority_level="a"} 7
x_total{flow_schema="service-accounts",priority_level="b"} 1.5e1
x_total_more{flow_schema="service-accounts"} 100
go_goroutines 12
`
	if got := sum(text, "x_total", `flow_schema="service-accounts"`); got != 22 {
		t.Errorf("got %v, want 22", got)
	}
	if got := sum(text, "go_goroutines", ""); got != 12 {
		t.Errorf("got %v, want 12", got)
	}
}

func TestProcessFigures(t *testing.T) {
	got := map[figure]float64{}
	if err := processFigures(os.Getpid(), "me", got); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{rssMemory, anonymous, descriptors} {
		if got[figure{"me", name}] <= 0 {
			t.Errorf("%s: %v", name, got[figure{"me", name}])
		}
	}
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	again := map[figure]float64{}
	if err := processFigures(os.Getpid(), "me", again); err != nil {
		t.Fatal(err)
	}
	if a, b := got[figure{"me", descriptors}], again[figure{"me", descriptors}]; b <= a {
		t.Errorf("%v descriptors, and %v with one more", a, b)
	}
}

// A soak that leaks says so.
func TestSoakReport(t *testing.T) {
	var r SoakResult
	for _, s := range []flat.Series{
		{Of: "n1-proxy", Figure: goroutines, Bound: boundOf(goroutines), Values: []float64{50, 50, 50, 50}},
		{Of: "n2-proxy", Figure: goroutines, Bound: boundOf(goroutines), Values: []float64{50, 60, 70, 80}},
		{Of: allNodes, Figure: requests, Bound: boundOf(requests), Values: []float64{1, 2, 3, 400}},
		{Of: allNodes, Figure: elementsOf + "ip landfall ports", Bound: boundOf(elementsOf), Values: []float64{90, 90, 80, 80}},
	} {
		s.At = []time.Duration{1, 2, 3, 4}
		r.Series, r.Verdicts = append(r.Series, s), append(r.Verdicts, flat.Judge(s))
	}
	slices.SortFunc(r.Verdicts, flat.Worse)
	text := SoakReport(r)
	for _, want := range []string{"n2-proxy", "NOT FLAT", "shown", "2 of 4 figures are not flat", "ip landfall ports: 90.0, then 80.0"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	if strings.Contains(text, "n1-proxy") {
		t.Errorf("of one figure the worst is enough:\n%s", text)
	}
}
