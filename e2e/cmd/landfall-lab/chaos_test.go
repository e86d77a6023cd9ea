package main

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/chaos"
	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	plot "github.com/landfall-lb/landfall/e2e/chaos/story"
)

// A run that fails is reported as far as it went, with how to run it again, whether or not it violated the contract.
func TestAFailedRunIsReported(t *testing.T) {
	told := plot.Story{Seed: 7, Rounds: []plot.Round{{Number: 3, Events: []plot.Event{{ID: 12, Kind: plot.Kill}}}}}
	violation := contract.Violation{Clause: 6, Name: "restarts lose nothing", Round: 3, Text: "a request"}
	failed := errors.New("the lab does not close")
	for _, bad := range [][]contract.Violation{nil, {violation}} {
		var out strings.Builder
		err := tellTrouble(t.Context(), &out, trouble{seed: 7, commit: "v1-2-gabc"}, chaos.Options{},
			func(context.Context, chaos.Options) (chaos.Result, error) {
				return chaos.Result{Told: told, Violations: bad, Journal: "what happened\n"}, failed
			})
		if !errors.Is(err, failed) || strings.Contains(err.Error(), "violated 1 times") != (len(bad) > 0) {
			t.Errorf("%d violations: %v", len(bad), err)
		}
		for _, want := range []string{"Landfall v1-2-gabc\n", "1 rounds, 1 events", "what happened\n", "again: landfall-lab chaos --seed 7 --only 12\n"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%d violations: %q is not in %s", len(bad), want, out.String())
			}
		}
		if strings.Contains(out.String(), violation.Text) != (len(bad) > 0) {
			t.Errorf("%d violations: %s", len(bad), out.String())
		}
	}
}

// A run that would tell no round is an error that names the value.
func TestARunTellsSomething(t *testing.T) {
	for want, asked := range map[string]trouble{"--minutes 0": {}, "--minutes -1": {minutes: -1},
		`--only "0"`: {minutes: 3, only: "0"}, `--only "3,-1"`: {only: "3,-1"}} {
		if _, err := asked.options(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", asked, err, want)
		}
	}
	if o, err := (trouble{seed: 7, only: "3,14"}).options(); err != nil || len(o.Story.IDs()) != 2 || o.Length != 0 {
		t.Errorf("%+v, %v", o, err)
	}
}
