package main

import (
	"context"
	"errors"
	"io"

	"github.com/landfall-lb/landfall/e2e/lab"
)

func demo(ctx context.Context, out io.Writer, options lab.Options, keep bool) error {
	return errors.New("soon")
}
