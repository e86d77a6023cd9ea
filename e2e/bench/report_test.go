package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestReadBenchmarks(t *testing.T) {
	const said = `goos: linux
pkg: github.com/landfall-lb/landfall/proxy/plan
BenchmarkNext/lc-2         	     100	      1234 ns/op	      16 B/op	       1 allocs/op
BenchmarkBroken-2 	 what is this
--- FAIL: BenchmarkOther
pkg: github.com/landfall-lb/landfall/e2e
BenchmarkCrash/crash/workers=3-2 	 10	 5.5e+09 ns/op	 184.0 ms-gap-p50
PASS
`
	want := []benchmark{
		{"proxy/plan", "Next/lc", 100, []figure{{1234, "ns/op"}, {16, "B/op"}, {1, "allocs/op"}}},
		{"e2e", "Crash/crash/workers=3", 10, []figure{{5.5e9, "ns/op"}, {184, "ms-gap-p50"}}},
	}
	got, err := readBenchmarks(strings.NewReader(said))
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
}

func aReport() report {
	row := func(proxy string, services int, ms float64) churnRow {
		return churnRow{Proxy: proxy, Services: services, Start: 10 * ms, Change: quantiles{ms, 2 * ms, 1}, Memory: 30, CPU: ms / 1000}
	}
	return report{Machine: machine{Began: time.Date(2026, 11, 24, 1, 2, 0, 0, time.UTC), Model: "A & B", Processors: 2},
		Churn: []churnRow{{Proxy: floor, Services: 1000, Start: 5}, row("landfall-nftables", 10_000, 7),
			row("landfall-nftables", 1000, 6), row("kube-proxy-nftables", 1000, 650)},
		Connections: []connectionRow{{Path: noRules, PerSecond: 1000}, {Path: "through", PerSecond: 900}},
		Benchmarks: []benchmark{{"e2e", "NewService/ahead=0", 3, []figure{{1e9, "ns/op"}, {660, "ms-gap-p50"}}},
			{"proxy/plan", "Next", 100, []figure{{12, "ns/op"}}}}}
}

func TestReport(t *testing.T) {
	file := filepath.Join(t.TempDir(), "performance.md")
	if err := aReport().write(file); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| begun | 2026-11-24 01:02 UTC |\n",
		"| machine | 2 × A & B, 0 GiB |\n",
		"| 1,000 | kube-proxy-nftables | 6500 | 650.0 / 1300.0 (1.0) |  |  | 30 | 0.00 | 0.65 |\n",
		"| 1,000 | floor | 5 |  |  |  | 0 | 0.00 | 0.00 |\n",
		"| through | 900 | 0 | 0 | 0.90 |\n",
		"| NewService/ahead=0 | 3 | 660 ms-gap-p50 | beside ahead=16 | a probe for another holder takes 600 ms |\n",
		"| proxy/plan Next | 100 | 12 ns/op | what it was | the processor: it waits for no kernel and no network |\n",
		"![change](performance/change.svg)\n",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%q is not in the report:\n%s", want, text)
		}
	}
	if strings.Contains(string(text), "From outside") {
		t.Error("what was not measured has a section")
	}
	for _, name := range []string{"start.svg", "change.svg", "memory.svg", "cpu-of-all-changes.svg", "figures.json"} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(file), "performance", name)); err != nil {
			t.Error(err)
		}
	}
}

// Every plot is well-formed, and all that it draws lies between the axes, whatever there is to draw.
func TestPlot(t *testing.T) {
	for _, p := range append(aReport().plots(), plot{title: "One & <only>", lines: []line{{name: "a", points: []point{{1, 0.0004}}}}}) {
		drawn := 0
		for decoder := xml.NewDecoder(strings.NewReader(p.svg())); ; {
			token, err := decoder.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", p.title, err)
			}
			circle, ok := token.(xml.StartElement)
			if !ok || circle.Name.Local != "circle" {
				continue
			}
			drawn++
			var x, y float64
			for _, a := range circle.Attr {
				into := map[string]*float64{"cx": &x, "cy": &y}[a.Name.Local]
				if into == nil {
					continue
				}
				if *into, err = strconv.ParseFloat(a.Value, 64); err != nil {
					t.Error(err)
				}
			}
			if x < plotLeft || x > plotRight || y < plotTop || y > plotBottom {
				t.Errorf("%s: a point at %v, %v", p.title, x, y)
			}
		}
		want := 0
		for _, l := range p.lines {
			want += len(l.points)
		}
		if drawn != want || want == 0 {
			t.Errorf("%s: %d points, want %d", p.title, drawn, want)
		}
	}
}

func TestAxis(t *testing.T) {
	a := newAxis([]point{{1, 0.3}, {1, 40}}, 100, 0, func(p point) float64 { return p.value })
	if d := cmp.Diff([]float64{0.1, 1, 10, 100}, a.ticks()); d != "" {
		t.Error(d)
	}
	for value, want := range map[float64]float64{0.1: 100, 100: 0} {
		if got := a.at(value); got != want {
			t.Errorf("%v is at %v, want %v", value, got, want)
		}
	}
	for value, want := range map[float64]string{0.01: "0.01", 1: "1", 1000: "1,000", 1_000_000: "1,000,000"} {
		if got := number(value); got != want {
			t.Errorf("%v: %s, want %s", value, got, want)
		}
	}
}
