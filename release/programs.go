package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/release/image"
)

// A platform is what Go builds for, such as linux/amd64.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "/" + p.arch }

// suffix ends the names of programs.
func (p platform) suffix() string {
	if p.os == "windows" {
		return ".exe"
	}
	return ""
}

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

// archives builds the programs of a platform and writes their archives: one of landfallctl, and one
// of all agents for Linux, each with its bill of materials beside it.
func (r release) archives(ctx context.Context, p platform) ([]archive, error) {
	folder, err := os.MkdirTemp("", "landfall-release-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	sets := map[string][]image.Program{image.Landfallctl.Name: {image.Landfallctl}}
	if p.os == "linux" {
		sets["landfall"] = image.Agents
	}
	var made []archive
	for _, set := range slices.Sorted(maps.Keys(sets)) {
		var files []string
		for _, program := range sets[set] {
			path := filepath.Join(folder, program.Name+p.suffix())
			if err := program.Build(ctx, r.Repository, p.os, p.arch, r.Version, path); err != nil {
				return nil, err
			}
			files = append(files, path)
		}
		name := fmt.Sprintf("%s_%s_%s_%s", set, r.Version, p.os, p.arch)
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
