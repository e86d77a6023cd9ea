package conformance

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/release/image"
)

// Names of specs as the suite has them.
const (
	endpoints   = "[sig-network] Services should serve a basic endpoint from pods [Conformance]"
	finalizer   = "[sig-network] LoadBalancers [Feature:LoadBalancer] should handle load balancer cleanup finalizer for service [Slow]"
	fromPods    = "[sig-network] LoadBalancers ExternalTrafficPolicy: Local [Feature:LoadBalancer] [Slow] should work from pods"
	gce         = "[sig-network] DNS should provide DNS for the cluster [Provider:GCE]"
	apiserver   = "[sig-network] Services should work after restarting apiserver [Disruptive]"
	sctp        = "[sig-network] Networking Granular Checks: Services should function for pod-Service: sctp [Feature:SCTPConnectivity]"
	zones       = "[sig-network] Traffic Distribution should route traffic correctly between pods on multiple nodes when using PreferClose"
	closeWait   = "[sig-network] KubeProxy should set TCP CLOSE_WAIT timeout [Privileged]"
	affinity    = "[sig-network] LoadBalancers [Feature:LoadBalancer] should be able to switch session affinity for LoadBalancer service with Local traffic policy [Slow] [LinuxOnly]"
	serviceCIDR = "[sig-network] Service CIDRs should create Services and serve on different Service CIDRs"
)

// testcase writes a test case as the suite's JUnit report has it.
func testcase(name, status, inside string) string {
	return fmt.Sprintf(`<testcase name="[It] %s" classname="Kubernetes e2e suite" status="%s" time="12.5">%s</testcase>`,
		name, status, inside)
}

func report(cases ...string) []byte {
	return []byte(`<?xml version="1.0" encoding="UTF-8"?><testsuites tests="1"><testsuite name="Kubernetes e2e suite">` +
		`<testcase name="[SynchronizedBeforeSuite]" status="passed" time="1"></testcase>` + strings.Join(cases, "") +
		`</testsuite></testsuites>`)
}

var day = time.Date(2026, 5, 4, 23, 0, 0, 0, time.FixedZone("", -2*3600))

func TestParse(t *testing.T) {
	const unselected = `<skipped message="skipped"></skipped>`
	specs, err := Parse(report(
		testcase(endpoints, "passed", ""),
		testcase(finalizer, "failed", "<failure type=\"failed\">[FAILED] \nTimed out after 60s.\nIn [It] at: x.go:1\n</failure>"),
		testcase(closeWait, "panicked", `<error type="panicked">[PANICKED]! at: x.go:2</error>`),
		testcase(gce, "skipped", `<skipped message="skipped - Only supported for providers [gce] (not skeleton)"></skipped>`),
		testcase(apiserver, "skipped", unselected),
		testcase(fromPods, "skipped", unselected),
		testcase(zones, "interrupted", `<error type="interrupted">Interrupted by Timeout</error>`),
		testcase(serviceCIDR, "passed", ""),
		testcase("[sig-storage] Volumes should mount", "passed", ""),
	), "1.2.3", day)
	if err != nil {
		t.Fatal(err)
	}
	ran := func(name string, result Result, reason string) Spec {
		return Spec{Name: name, Result: result, Reason: reason, Seconds: 12.5, Date: "2026-05-05", Landfall: "1.2.3"}
	}
	want := []Spec{
		ran(endpoints, Passed, ""),
		ran(finalizer, Failed, "Timed out after 60s."),
		ran(closeWait, Failed, "[PANICKED]! at: x.go:2"),
		ran(gce, Skipped, "Only supported for providers [gce] (not skeleton)"),
		{Name: apiserver, Result: Skipped, Reason: exclusions[0].reason},
		{Name: fromPods, Result: NotRun},
		{Name: zones, Result: NotRun},
	}
	if !reflect.DeepEqual(specs, want) {
		t.Errorf("got\n%+v\nwant\n%+v", specs, want)
	}
}

func TestParseRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"no XML": "{}", "cut off": "<testsuites><testsuite>", "no spec of ours": string(report(testcase("[sig-node] x", "passed", ""))),
	} {
		if specs, err := Parse([]byte(text), "1", day); err == nil {
			t.Errorf("%s: no error, but %+v", name, specs)
		}
	}
}

// A run of a part replaces what it ran, and only that; the order of runs that do not overlap does not
// matter.
func TestMerge(t *testing.T) {
	passed := func(name, date string) Spec { return Spec{Name: name, Result: Passed, Date: date, Landfall: "1"} }
	notRun := func(name string) Spec { return Spec{Name: name, Result: NotRun} }
	services := []Spec{passed(endpoints, "2026-05-01"), notRun(finalizer), notRun(zones)}
	balancers := []Spec{notRun(endpoints), {Name: finalizer, Result: Failed, Reason: "why"}, notRun(zones)}
	merge := func(runs ...[]Spec) []Spec {
		r := Report{}
		for _, run := range runs {
			r = r.Merge("nftables", "v1", run)
		}
		return r.Modes["nftables"]
	}
	want := []Spec{{Name: finalizer, Result: Failed, Reason: "why"}, passed(endpoints, "2026-05-01"), notRun(zones)}
	for name, got := range map[string][]Spec{
		"one way": merge(services, balancers), "the other": merge(balancers, services), "twice": merge(services, balancers, balancers),
	} {
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n%+v\nwant\n%+v", name, got, want)
		}
	}
	again := merge(services, balancers, []Spec{passed(finalizer, "2026-05-02"), notRun(endpoints)})
	if want := []Spec{passed(finalizer, "2026-05-02"), passed(endpoints, "2026-05-01")}; !reflect.DeepEqual(again, want) {
		t.Errorf("a second run, of a suite without %q:\n%+v\nwant\n%+v", zones, again, want)
	}
	r := Report{}.Merge("nftables", "v1", services).Merge("iptables", "v1", balancers)
	if len(r.Modes) != 2 {
		t.Errorf("modes %v", r.Modes)
	}
	if r = r.Merge("iptables", "v2", balancers); r.Kubernetes != "v2" || len(r.Modes) != 1 || len(r.Modes["iptables"]) != 3 {
		t.Errorf("another version of Kubernetes: %+v", r)
	}
}

func TestMarkdown(t *testing.T) {
	r := Report{}.Merge("nftables", "v1.35.4", []Spec{
		{Name: endpoints, Result: Passed, Date: "2026-05-01", Landfall: "0.1.0"},
		{Name: finalizer, Result: Failed, Reason: "Expected <int>: 1", Date: "2026-05-03", Landfall: "0.2.0"},
		{Name: gce, Result: Skipped, Reason: "Only supported for providers [gce]", Date: "2026-05-02", Landfall: "0.2.0"},
		{Name: sctp, Result: Skipped, Reason: excluded(sctp)},
		{Name: zones, Result: NotRun},
		{Name: affinity, Result: Failed, Reason: "Affinity shouldn't hold but did."},
	})
	text := r.Markdown()
	for _, want := range []string{
		introduction, "Of Kubernetes v1.35.4.", "### nftables mode\n\nRun from 2026-05-01 to 2026-05-03, with Landfall 0.1.0, 0.2.0.\n",
		"| Services | 1 | 0 | 0 | 0 |\n", "| LoadBalancers | 0 | 2 | 0 | 0 |\n", "| DNS | 0 | 0 | 1 | 0 |\n",
		"| Networking | 0 | 0 | 1 | 0 |\n", "| Traffic Distribution | 0 | 0 | 0 | 1 |\n", "| **all** | 1 | 2 | 2 | 1 |\n",
		"- `Affinity shouldn't hold but did.` It wants the pods of three nodes",
		"- `Expected <int>: 1`\n  - LoadBalancers \\[Feature:LoadBalancer\\] should handle",
		"- Only supported for providers \\[gce\\]\n  - DNS should provide DNS for the cluster",
		"- It needs SCTP sockets", "Not run yet:\n\n- Traffic Distribution should route",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "iptables mode\n\nRun") {
		t.Error("results of a mode that never ran")
	}
	text = r.Merge(KubeProxy, "v1.35.4", []Spec{{Name: endpoints, Result: Passed}, {Name: zones, Result: NotRun},
		{Name: affinity, Result: Failed, Reason: "Affinity shouldn't hold but did."}}).Markdown()
	_, text, _ = strings.Cut(text, "### kube-proxy\n")
	if !strings.Contains(text, "Failed:\n\n- `Affinity") || !strings.Contains(text, "Passed:\n\n- Services should serve") ||
		strings.Contains(text, "Traffic Distribution") {
		t.Errorf("the comparison is\n%s", text)
	}
}

func TestSelection(t *testing.T) {
	all := []string{endpoints, finalizer, fromPods, gce, apiserver, sctp, zones, closeWait, serviceCIDR}
	for name, c := range map[string]struct {
		focus, specs string
		want         []string
	}{
		"all":      {want: []string{endpoints, finalizer, fromPods, gce, zones, closeWait}},
		"groups":   {focus: "LoadBalancers,Traffic Distribution", want: []string{finalizer, fromPods, zones}},
		"specs":    {specs: "finalizer|from pods", want: []string{endpoints, finalizer, fromPods}},
		"services": {focus: "Services", want: []string{endpoints}},
	} {
		run, skip, err := selection(c.focus, c.specs)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range all {
			if matches(t, run, s) && !matches(t, skip, s) {
				got = append(got, s)
			}
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %q select\n%q, want\n%q", name, run, got, c.want)
		}
	}
	for _, wrong := range [][2]string{{"Service", ""}, {"Services, DNS", ""}, {"", "("}} {
		if _, _, err := selection(wrong[0], wrong[1]); err == nil {
			t.Errorf("%q: no error", wrong)
		}
	}
}

func TestAliases(t *testing.T) {
	got := aliases("registry.k8s.io/e2e-test-images/agnhost:2.59\nregistry.k8s.io/pause:3.10.1\nregistry.k8s.io/etcd:3.6.6-0\n")
	want := map[string]string{
		"registry.k8s.io/e2e-test-images/agnhost:2.59": agnhostImage, "registry.k8s.io/pause:3.10.1": "landfall.test/pause:cluster",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A container finds each program once, and those of packages before those of busybox.
func TestRoot(t *testing.T) {
	seen := map[string]string{}
	for _, f := range root([]image.File{{Path: "bin/busybox", Mode: 0o755}, {Path: "usr/bin/nslookup", Mode: 0o755}}) {
		if old, ok := seen[path.Base(f.Path)]; ok {
			t.Errorf("%s is there as %s too", f.Path, old)
		}
		seen[path.Base(f.Path)] = f.Path + " " + f.Link
	}
	for name, want := range map[string]string{
		"sh": "bin/sh busybox", "nc": "bin/nc nc.openbsd", "nslookup": "usr/bin/nslookup ",
	} {
		if seen[name] != want {
			t.Errorf("%s is %q, want %q", name, seen[name], want)
		}
	}
}

// The files in docs are what a run would have written.
func TestUpdate(t *testing.T) {
	docs := t.TempDir()
	first := []Spec{{Name: endpoints, Result: Passed, Seconds: 3, Date: "2026-05-01", Landfall: "1"}, {Name: zones, Result: NotRun}}
	second := []Spec{{Name: endpoints, Result: NotRun}, {Name: zones, Result: Skipped, Reason: "three zones", Date: "2026-05-01"}}
	for _, run := range [][]Spec{first, second} {
		if err := update(docs, "iptables", "v1", run); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join(docs, "conformance.md"))
	if err != nil || !strings.Contains(string(text), "| **all** | 1 | 0 | 1 | 0 |") {
		t.Errorf("%s, %v", text, err)
	}
	if err := update(docs, KubeProxy, "v1", first); err != nil {
		t.Fatal(err)
	}
	text, err = os.ReadFile(filepath.Join(docs, "conformance.json"))
	if err != nil || !strings.Contains(string(text), KubeProxy) || strings.Count(string(text), zones) != 1 {
		t.Errorf("what did not run is in the comparison: %s, %v", text, err)
	}
	if err := os.WriteFile(filepath.Join(docs, "conformance.json"), []byte("["), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := update(docs, "iptables", "v1", first); err == nil {
		t.Error("a broken file is replaced")
	}
}

func matches(t *testing.T, pattern, name string) bool {
	t.Helper()
	ok, err := regexp.MatchString(pattern, name)
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

var write = flag.Bool("update", false, "write docs/design/conformance.md from docs/design/conformance.json")

// What is committed was written by this package, from results that it keeps.
func TestCommittedReport(t *testing.T) {
	text, err := os.ReadFile("../../docs/design/conformance.json")
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	if *write {
		if err := os.WriteFile("../../docs/design/conformance.md", []byte(r.Markdown()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	page, err := os.ReadFile("../../docs/design/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(page) != r.Markdown() {
		t.Error("docs/design/conformance.md is not what docs/design/conformance.json gives: go test ./e2e/conformance -update")
	}
}
