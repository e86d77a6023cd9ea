package main

import (
	"context"
	"fmt"
	"io"

	"github.com/landfall-lb/landfall/e2e/conformance"
)

// conform runs upstream's suite on a cluster of real kubelets. Specs that failed are an error.
func conform(ctx context.Context, out io.Writer, o conformance.Options) error {
	p := newPrinter(out)
	o.Progress = p.progress
	specs, err := conformance.Run(ctx, o)
	if err != nil {
		return err
	}
	p.section("The suite in " + o.Mode + " mode")
	failed := 0
	for _, s := range specs {
		if s.Result == conformance.Failed {
			failed++
		}
	}
	for _, line := range conformance.Summary(specs) {
		p.line("%s", line)
	}
	if failed > 0 {
		return fmt.Errorf("%d specs failed", failed)
	}
	return nil
}
