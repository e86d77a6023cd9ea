package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// soak runs churn for some minutes, prints what grew, and writes all figures to a file. What is not flat is an error.
func soak(ctx context.Context, out io.Writer, minutes int, file string, options lab.Options) error {
	result, err := chaos.Soak(ctx, time.Duration(minutes)*time.Minute, chaos.Options{Lab: options,
		Progress: func(line string) { fmt.Fprintln(out, line) }})
	if err != nil {
		return err
	}
	fmt.Fprint(out, "\n", chaos.SoakReport(result))
	if file != "" {
		text, err := json.MarshalIndent(result, "", "  ")
		if err == nil {
			err = os.WriteFile(file, append(text, '\n'), 0o644)
		}
		if err != nil {
			return err
		}
		fmt.Fprintln(out, "all figures:", file)
	}
	if n := len(result.NotFlat()); n > 0 {
		return fmt.Errorf("%d figures are not flat", n)
	}
	return nil
}
