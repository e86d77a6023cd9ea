package router_test

import (
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/nstest"
)

func TestFRRAnswersAlsoAfterACrash(t *testing.T) {
	r := routertest.FRR(t, nstest.New(t), router.Options{Config: "router bgp 64501\n bgp router-id 10.0.0.1", BFD: "bfd"})
	if out, err := r.Ask(t.Context(), "show running-config"); err != nil || !strings.Contains(out, "router bgp 64501") {
		t.Errorf("%v: %s", err, out)
	}
	if err := r.JSON(t.Context(), "show bfd peers json", &[]any{}); err != nil {
		t.Error(err)
	}
	r.Kill("bgpd")
	if err := r.Launch(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out, err := r.Ask(t.Context(), "show running-config"); err != nil || !strings.Contains(out, "router bgp 64501") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestBIRDAnswers(t *testing.T) {
	r := routertest.BIRD(t, nstest.New(t), "router id 10.0.0.1;\nprotocol device {}\n")
	out, err := r.Ask(t.Context(), "show status")
	if err != nil || !strings.Contains(out, "Router ID is 10.0.0.1") {
		t.Errorf("%v: %s", err, out)
	}
}
