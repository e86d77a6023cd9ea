// Landfall-image writes Landfall's container image without a daemon and without a base image, as an
// archive that docker, podman, ctr and skopeo read.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/landfall-lb/landfall/e2e/cache"
	"github.com/landfall-lb/landfall/release/image"
)

const usage = `usage:
  landfall-image build [--arch amd64,arm64] [--name NAME:TAG] [--version VERSION] [--output FILE]
                       write an archive in the OCI image layout, and a bill of materials (SPDX) for each architecture
  landfall-image root [--arch ARCH] --output DIR
                       write the files of Debian's packages in it to a folder, for the Dockerfile
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
	case err != nil:
		fmt.Fprintln(os.Stderr, "landfall-image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return flag.ErrHelp
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	archs := flags.String("arch", runtime.GOARCH, "")
	name := flags.String("name", "ghcr.io/landfall-lb/landfall:devel", "")
	version := flags.String("version", "devel", "")
	to := flags.String("output", "", "")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if *archs == "" { // as TARGETARCH is, without BuildKit
		*archs = runtime.GOARCH
	}
	kept, err := cache.Folder()
	if err != nil {
		return err
	}
	switch {
	case args[0] == "root" && *to != "":
		files, _, err := image.Debian(ctx, *archs, kept)
		if err != nil {
			return err
		}
		return image.Extract(files, *to)
	case args[0] == "build" && *to != "":
		return build(ctx, out, strings.Split(*archs, ","), *name, *to, image.Landfall{
			Repository: ".", Cache: kept, Version: *version, Progress: func(line string) { fmt.Fprintln(out, " ", line) },
		})
	default:
		return flag.ErrHelp
	}
}

// build writes the archive and the bills, and says what is in it.
func build(ctx context.Context, out io.Writer, archs []string, name, to string, l image.Landfall) (err error) {
	if l.Revision, l.Created, err = image.Sources(ctx, l.Repository); err != nil {
		return err
	}
	var images []image.Image
	for _, arch := range archs {
		made, bill, err := l.Image(ctx, arch)
		if err != nil {
			return err
		}
		images = append(images, made)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := bill.Write(strings.TrimSuffix(to, ".tar") + "-" + arch + ".spdx.json"); err != nil {
			return err
		}
	}
	written, err := image.Write(to, name, images...)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s: %s\n", to, name)
	for _, w := range written {
		fmt.Fprintf(out, "  %-6s %s, %.1f MiB compressed\n", w.Arch, w.Digest, float64(w.Size)/(1<<20))
	}
	return nil
}
