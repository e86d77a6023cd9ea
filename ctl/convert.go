package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"sigs.k8s.io/yaml"
)

// metallbResources are the API server's paths of MetalLB's kinds, and of Services, which hold
// addresses.
var metallbResources = []string{
	"/apis/metallb.io/v1beta1/ipaddresspools", "/apis/metallb.io/v1beta1/l2advertisements",
	"/apis/metallb.io/v1beta1/bgpadvertisements",
	"/apis/metallb.io/v1beta2/bgppeers", "/apis/metallb.io/v1beta1/bfdprofiles", "/apis/metallb.io/v1beta1/communities",
	"/api/v1/services",
}

// runMigrate prints Landfall's equivalent of MetalLB's objects.
func runMigrate(ctx context.Context, o options, stdin io.Reader, stdout io.Writer) error {
	var objects []object
	var err error
	if len(o.files) > 0 {
		objects, err = fromFiles(o.files, stdin)
	} else {
		objects, err = fromCluster(ctx, o)
	}
	if err != nil {
		return err
	}
	m := migrate(objects)
	if len(m.objects) == 0 {
		return errors.New("found no MetalLB objects (API group metallb.io)")
	}
	return m.print(stdout)
}

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
	return migration{objects: []manifest{pool}}.print(stdout)
}

// open opens a file, or with - the standard input.
func open(name string, stdin io.Reader) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(name)
}

func fromFiles(names []string, stdin io.Reader) ([]object, error) {
	var all []object
	for _, name := range names {
		r, err := open(name, stdin)
		if err != nil {
			return nil, err
		}
		objects, err := decodeObjects(r)
		_ = r.Close() // only read
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, objects...)
	}
	return all, nil
}

func fromCluster(ctx context.Context, o options) ([]object, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, _, err := o.connect(ctx)
	if err != nil {
		return nil, err
	}
	var all []object
	for _, path := range metallbResources {
		raw, err := client.Raw(ctx, path)
		if err != nil {
			return nil, err
		}
		objects, err := decodeObjects(bytes.NewReader(raw))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, objects...)
	}
	return all, nil
}

// print writes the notes as comments, then the objects, ready for kubectl apply.
func (m migration) print(w io.Writer) error {
	var out bytes.Buffer
	for _, note := range m.notes {
		fmt.Fprintf(&out, "# %s\n", note)
	}
	for _, o := range m.objects {
		text, err := yaml.Marshal(o)
		if err != nil {
			return err
		}
		out.WriteString("---\n")
		out.Write(text)
	}
	_, err := w.Write(out.Bytes())
	return err
}
