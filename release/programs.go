package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/e2e/image"
)

// A platform is what Go builds for, such as linux/amd64.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "/" + p.arch }

// platforms are those of a release: agents run on Linux, landfallctl where people sit.
var platforms = []platform{
	{"linux", "amd64"},
	{"linux", "arm64"},
	{"darwin", "amd64"},
	{"darwin", "arm64"},
	{"windows", "amd64"},
}

// platformsNamed returns the platforms of a comma-separated list, or all for an empty one.
func platformsNamed(list string) (chosen []platform, err error) {
	if list == "" {
		return platforms, nil
	}
	for name := range strings.SplitSeq(list, ",") {
		i := slices.IndexFunc(platforms, func(p platform) bool { return p.String() == name })
		if i < 0 {
			return nil, fmt.Errorf("%q is none of %v", name, platforms)
		}
		chosen = append(chosen, platforms[i])
	}
	return chosen, nil
}

// A program and the folder of its main package.
type program struct{ name, folder string }

var (
	agents = []program{
		{"landfall-controller", "./controller"},
		{"landfall-speaker", "./speaker"},
		{"landfall-proxy", "./proxy"},
	}
	landfallctl = program{"landfallctl", "./ctl"}
)

// archives builds the programs of a platform and writes their archives: one of landfallctl, and one
// of all agents for Linux, each with its bill of materials beside it.
func (r release) archives(ctx context.Context, p platform) ([]archive, error) {
	folder, err := os.MkdirTemp("", "landfall-release-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	sets := []struct {
		name     string
		programs []program
	}{{"landfallctl", []program{landfallctl}}}
	if p.os == "linux" {
		sets = append(sets, struct {
			name     string
			programs []program
		}{"landfall", agents})
	}
	var made []archive
	for _, set := range sets {
		var files []string
		for _, program := range set.programs {
			path, err := r.build(ctx, p, program, folder)
			if err != nil {
				return nil, err
			}
			files = append(files, path)
		}
		name := fmt.Sprintf("%s_%s_%s_%s", set.name, r.Version, p.os, p.arch)
		bill := image.SBOM{Name: name, Version: r.Version, Created: r.Time, Purpose: "ARCHIVE"}
		for _, path := range files {
			if err := bill.AddProgram(path); err != nil {
				return nil, err
			}
		}
		if err := bill.Write(filepath.Join(r.Out, name+".spdx.json")); err != nil {
			return nil, err
		}
		files = append(files, filepath.Join(r.Repository, "LICENSE"))
		a, err := r.pack(name, p, files)
		if err != nil {
			return nil, err
		}
		made = append(made, a)
	}
	return made, nil
}

// build compiles as "make build" does, so that a machine compiles each package once for both.
func (r release) build(ctx context.Context, p platform, program program, folder string) (string, error) {
	path := filepath.Join(folder, program.name)
	if p.os == "windows" {
		path += ".exe"
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags",
		"-s -w -X github.com/landfall-lb/landfall/internal/ops.Version="+r.Version, "-o", path, program.folder)
	cmd.Dir = r.Repository
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+p.os, "GOARCH="+p.arch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build %s: %w\n%s", program.folder, err, out)
	}
	return path, nil
}
