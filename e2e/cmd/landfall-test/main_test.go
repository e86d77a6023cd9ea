package main

import (
	"errors"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
)

func TestParseSuites(t *testing.T) {
	got, err := parseSuites(strings.Fields("unit -race ./a ./b -- e2e CGO_ENABLED=0 X=y -timeout=5m ./e2e/..."))
	if err != nil || len(got) != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	if s := got[0]; s.name != "unit" || len(s.env) != 0 || !slices.Equal(s.args, []string{"-race", "./a", "./b"}) {
		t.Errorf("first %+v", s)
	}
	if s := got[1]; s.name != "e2e" || !slices.Equal(s.env, []string{"CGO_ENABLED=0", "X=y"}) ||
		!slices.Equal(s.args, []string{"-timeout=5m", "./e2e/..."}) {
		t.Errorf("second %+v", s)
	}
	if _, err := parseSuites([]string{"unit", "--", "e2e", "./e2e"}); err == nil {
		t.Error("a suite without arguments was taken")
	}
	if _, err := parseSuites(nil); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("no suite: %v", err)
	}
}

// events are those of two packages: one whose tests pass, fail and are skipped, and one that does
// not compile.
var events = strings.ReplaceAll(`{"Action":"start","Package":"MODULE/a"}
{"Action":"run","Package":"MODULE/a","Test":"TestGood"}
{"Action":"output","Package":"MODULE/a","Test":"TestGood","Output":"of a good test\n"}
{"Action":"pass","Package":"MODULE/a","Test":"TestGood","Elapsed":2.5}
{"Action":"run","Package":"MODULE/a","Test":"TestBad"}
{"Action":"run","Package":"MODULE/a","Test":"TestBad/one"}
{"Action":"output","Package":"MODULE/a","Test":"TestBad/one","Output":"of a bad subtest\n"}
{"Action":"output","Package":"MODULE/a","Test":"TestBad/one","Output":"    a_test.go:7: no answer\n"}
{"Action":"output","Package":"MODULE/a","Test":"TestBad/one","Output":"    a_test.go:7: no answer again\n"}
{"Action":"fail","Package":"MODULE/a","Test":"TestBad/one","Elapsed":0.5}
{"Action":"fail","Package":"MODULE/a","Test":"TestBad","Elapsed":0.5}
{"Action":"run","Package":"MODULE/a","Test":"TestNo"}
{"Action":"skip","Package":"MODULE/a","Test":"TestNo","Elapsed":0}
{"Action":"run","Package":"MODULE/a","Test":"TestWide"}
{"Action":"run","Package":"MODULE/a","Test":"TestWide/one"}
{"Action":"pause","Package":"MODULE/a","Test":"TestWide/one"}
{"Action":"cont","Package":"MODULE/a","Test":"TestWide/one"}
{"Action":"pass","Package":"MODULE/a","Test":"TestWide/one","Elapsed":4}
{"Action":"pass","Package":"MODULE/a","Test":"TestWide","Elapsed":0.1}
{"Action":"output","Package":"MODULE/a","Output":"FAIL\tMODULE/a\t3.0s\n"}
{"Action":"fail","Package":"MODULE/a","Elapsed":3}
{"ImportPath":"MODULE/b [MODULE/b.test]","Action":"build-output","Output":"b.go:1: no such thing\n"}
{"ImportPath":"MODULE/b [MODULE/b.test]","Action":"build-fail"}
{"Action":"start","Package":"MODULE/b"}
{"Action":"fail","Package":"MODULE/b","Elapsed":0}
{"Action":"run","Package":"MODULE/c","Test":"TestPanic"}
{"Action":"output","Package":"MODULE/c","Test":"TestPanic","Output":"panic: help\n"}
{"Action":"fail","Package":"MODULE/c","Elapsed":1}
no event
`, "MODULE/", modulePath)

func TestReport(t *testing.T) {
	var out strings.Builder
	r := newReport(&out, "e2e")
	if err := r.read("unit", strings.NewReader(events)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"of a bad subtest\n", "FAIL\tgithub", "b.go:1: no such thing\n", "panic: help\n",
		"no event\n"} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("not once %q in\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "of a good test") {
		t.Errorf("the output of a test that passed:\n%s", out.String())
	}
	want := `
The 5 slowest tests:
  SECONDS  TEST          PACKAGE
      4.0  TestWide/one  a
      2.5  TestGood      a
      0.5  TestBad       a
      0.1  TestWide      a
      0.0  TestNo        a

Failed:
  a TestBad/one
    a_test.go:7: no answer
  a TestBad
  b
  c TestPanic

3 tests passed, 4 failed, 1 were skipped, in 7 s (subtests are counted too)
`
	if got := r.summary(7 * time.Second); got != want {
		t.Errorf("summary:\n%s\nwant:\n%s", got, want)
	}
	out.Reset()
	if err := r.read("e2e", strings.NewReader(events)); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "of a good test") {
		t.Errorf("a verbose suite does not show the output of a test that passed:\n%s", out.String())
	}
}

func TestProgress(t *testing.T) {
	r := newReport(&strings.Builder{}, "")
	began := time.Now()
	r.take("unit", event{Action: "run", Package: modulePath + "a", Test: "TestOne"})
	r.take("unit", event{Action: "run", Package: modulePath + "a", Test: "TestTwo"})
	r.take("unit", event{Action: "run", Package: modulePath + "a", Test: "TestTwo/part"})
	r.take("unit", event{Action: "pause", Package: modulePath + "a", Test: "TestTwo"})
	got := r.progress(began.Add(time.Minute), began)
	if !strings.HasPrefix(got, "  60 s: 0 passed, 0 failed; running: a TestOne ") || strings.Contains(got, "TestTwo") {
		t.Errorf("%q", got)
	}
	r.take("unit", event{Action: "cont", Package: modulePath + "a", Test: "TestTwo"})
	r.take("unit", event{Action: "pass", Package: modulePath + "a", Test: "TestOne"})
	if got := r.progress(began.Add(time.Minute), began); !strings.Contains(got, "1 passed") ||
		!strings.Contains(got, "running: a TestTwo ") {
		t.Errorf("%q", got)
	}
}

// Real runs of "go test", of a module with one test: the suite's variables reach it, and a failure
// is an error.
func TestRun(t *testing.T) {
	writeModule(t, `package x
import ("os"; "testing")
func TestWord(t *testing.T) { if os.Getenv("WORD") != "right" { t.Error("the wrong word") } }
`)
	var out strings.Builder
	if err := run(t.Context(), []string{"--summary", "summary", "one", "WORD=right", "."}, &out); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
	if text, err := os.ReadFile("summary"); err != nil || !strings.Contains(string(text), "1 tests passed, 0 failed") {
		t.Errorf("%v: %s", err, text)
	}
	out.Reset()
	err := run(t.Context(), []string{"one", "WORD=right", ".", "--", "two", "WORD=other", "."}, &out)
	if err == nil || !strings.Contains(err.Error(), "suite two: exit status 1") ||
		!strings.Contains(out.String(), "the wrong word") || !strings.Contains(out.String(), "1 tests passed, 1 failed") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// A test that fails in its first run only is flaky; one that always fails, panics, has a data race or saw a violation of
// the contract is a failure.
func TestAgain(t *testing.T) {
	const once = `
func TestOnce(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		_ = os.WriteFile("ran", nil, 0o600)
		t.Run("part", func(t *testing.T) { t.Error("the first time") })
	}
}
`
	for name, c := range map[string]struct {
		source string
		again  string
		want   string // in the summary
		fails  bool
	}{
		"flaky":    {once, "1", "passed 3 times alone. Each is a defect, of the test or of what it tests:\n  example.com/x TestOnce\n    x_test.go:8: the first time\n\n3 tests passed, 0 failed", false},
		"never":    {once, "0", "1 tests passed, 2 failed", true},
		"too many": {once + `func TestBad(t *testing.T) { t.Error("bad") }`, "1", "1 tests passed, 3 failed", true},
		"always":   {once + `func TestBad(t *testing.T) { t.Error("bad") }`, "2", "3 tests passed, 1 failed", true},
		"panic":    {once + `func TestBad(t *testing.T) { panic("bad") }`, "2", "1 tests passed, 3 failed", true},
		"contract": {once + `func TestBroken(t *testing.T) {
	t.Log("seed 7\n` + contract.Violated + ` in round 3: clause 5, planned changes lose nothing: a request")
	if _, err := os.Stat("broke"); err != nil {
		_ = os.WriteFile("broke", nil, 0o600)
		t.Fail()
	}
}`, "2", "1 tests passed, 3 failed", true},
		"race": {once + `func TestRace(t *testing.T) {
	t.Log("of the race detector:")
	os.Stdout.WriteString("WARNING: DATA RACE\n")
	if _, err := os.Stat("raced"); err != nil {
		_ = os.WriteFile("raced", nil, 0o600)
		t.Fail()
	}
}`, "2", "1 tests passed, 3 failed", true},
	} {
		t.Run(name, func(t *testing.T) {
			writeModule(t, `package x
import ("os"; "testing")
func TestGood(t *testing.T) {}
`+c.source)
			var out strings.Builder
			err := run(t.Context(), []string{"--again", c.again, "one", "-vet=off", "."}, &out)
			if (err != nil) != c.fails || !strings.Contains(out.String(), c.want) {
				t.Errorf("%v\n%s", err, out.String())
			}
		})
	}
}

// writeModule makes a module with one file of tests, and goes to its folder.
func writeModule(t *testing.T, tests string) {
	t.Helper()
	t.Chdir(t.TempDir())
	t.Setenv("GOFLAGS", "")
	for name, text := range map[string]string{"go.mod": "module example.com/x\n\ngo 1.26\n", "x_test.go": tests} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
