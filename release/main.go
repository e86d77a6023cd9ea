// Command landfall-release makes what people download: archives of the programs, the packaged
// chart, bills of materials, the manifest of the kubectl plugin, notes and checksums. The same
// commit gives the same bytes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/landfall-lb/landfall/release/image"
)

const usage = `usage: landfall-release [flags] VERSION
Makes the release VERSION (semantic, without v; its core is the version of charts/landfall/Chart.yaml).

`

// A release is what all steps know.
type release struct {
	// Version is semantic and without a v, such as 0.1.0.
	Version string
	// Repository is the root of the source tree, Out the folder that gets the files.
	Repository, Out string
	// Helm is the path of the program.
	Helm string
	// Time is when the commit was made: the time of every file in an archive.
	Time time.Time
	// Images are files made elsewhere that belong to the release, such as archives of the image.
	Images []string
	// Platforms is what programs are built for.
	Platforms []platform
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, "landfall-release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("landfall-release", flag.ContinueOnError)
	r := release{}
	flags.StringVar(&r.Repository, "repository", ".", "root of the source `tree`")
	flags.StringVar(&r.Out, "out", "dist", "`folder` for the files; what was in it is removed")
	flags.StringVar(&r.Helm, "helm", "helm", "`path` of helm")
	images := flags.String("images", "", "comma-separated `files` to add, such as archives of the image")
	chosen := flags.String("platforms", "", "comma-separated `platforms` such as linux/amd64 (default: all)")
	flags.Usage = func() {
		fmt.Fprint(flags.Output(), usage)
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		flags.Usage()
		return flag.ErrHelp
	}
	r.Version = flags.Arg(0)
	if *images != "" {
		r.Images = strings.Split(*images, ",")
	}
	var err error
	if r.Platforms, err = platformsNamed(*chosen); err != nil {
		return fmt.Errorf("--platforms: %w", err)
	}
	commit, created, err := image.Sources(ctx, r.Repository)
	if err != nil {
		return err
	}
	if commit == "" && os.Getenv("SOURCE_DATE_EPOCH") == "" {
		return errors.New("time of the last commit: neither git nor SOURCE_DATE_EPOCH says it")
	}
	r.Time = created
	return r.make(ctx)
}

// make runs all steps. Checksums are last, as they cover everything.
func (r release) make(ctx context.Context) error {
	if err := r.checkVersion(); err != nil {
		return err
	}
	if err := os.RemoveAll(r.Out); err != nil {
		return err
	}
	if err := os.MkdirAll(r.Out, 0o755); err != nil {
		return err
	}
	var archives []archive
	for _, p := range r.Platforms {
		made, err := r.archives(ctx, p)
		if err != nil {
			return fmt.Errorf("programs for %s: %w", p, err)
		}
		archives = append(archives, made...)
	}
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"chart", func() error { return r.chart(ctx) }},
		{"images", r.images},
		{"plugin's manifest", func() error { return r.plugin(archives) }},
		{"notes", r.notes},
		{"checksums", r.checksums},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

// semantic is https://semver.org without build metadata, which tags of images cannot hold.
var semantic = regexp.MustCompile(`^(\d+\.\d+\.\d+)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$`)

var chartVersion = regexp.MustCompile(`(?m)^version: (\S+)$`)

// checkVersion refuses a version that is not the chart's: a chart installed from the source tree
// and a packaged one must not name different images for the same code.
func (r release) checkVersion() error {
	match := semantic.FindStringSubmatch(r.Version)
	if match == nil {
		return fmt.Errorf("version %q is not semantic: it must be like 0.1.0 or 0.1.0-rc.1", r.Version)
	}
	path := filepath.Join(r.Repository, "charts/landfall/Chart.yaml")
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	in := chartVersion.FindSubmatch(text)
	if in == nil {
		return fmt.Errorf("%s: no version", path)
	}
	if core := string(in[1]); core != match[1] {
		return fmt.Errorf("version %s: %s has version %s: change it first", r.Version, path, core)
	}
	return nil
}
