package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/landfall-lb/landfall/ctl/migrate"
)

// runImport prints an IPAddressPool for a list of addresses.
func runImport(name string, o options, stdin io.Reader, stdout io.Writer) error {
	if len(o.files) != 1 {
		return errors.New("one file is needed: import NAME -f FILE")
	}
	r, err := open(o.files[0], stdin)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // only read
	pool, err := importList(name, r)
	if err != nil {
		return fmt.Errorf("%s: %w", o.files[0], err)
	}
	if o.output == "json" {
		return write(stdout, o.output, pool, "")
	}
	return migrate.Conversion{Objects: []migrate.Manifest{pool}}.Print(stdout)
}

// open opens a file, or with - the standard input.
func open(name string, stdin io.Reader) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(name)
}

func fromFiles(names []string, stdin io.Reader) ([]migrate.Object, error) {
	var all []migrate.Object
	for _, name := range names {
		r, err := open(name, stdin)
		if err != nil {
			return nil, err
		}
		objects, err := migrate.Decode(r)
		_ = r.Close() // only read
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, objects...)
	}
	return all, nil
}
