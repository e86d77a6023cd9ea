package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Landfall says what to make Landfall's image of.
type Landfall struct {
	// Repository is the root of the source tree, Cache a folder that keeps Debian packages.
	Repository, Cache string
	// Programs is a folder with Landfall's programs for this machine's architecture; empty to build
	// them.
	Programs string
	// Version is stamped into the programs and the labels.
	Version string
	// Revision is the commit of the sources, Created its time.
	Revision string
	Created  time.Time
	// Progress gets a line for each slow step.
	Progress func(line string)
}

// Program is one of Landfall's and its package.
type Program struct{ Name, Package string }

// Agents are the programs that run in a cluster.
var Agents = []Program{
	{"landfall-controller", "./controller"}, {"landfall-proxy", "./proxy"}, {"landfall-speaker", "./speaker"},
}

// Landfallctl is for those who look after it.
var Landfallctl = Program{"landfallctl", "./ctl"}

// programs are those in the image.
var programs = append(slices.Clone(Agents), Landfallctl)

// Image returns Landfall's image for an architecture, and its bill of materials.
func (l Landfall) Image(ctx context.Context, arch string) (_ Image, _ SBOM, err error) {
	fail := func(err error) (Image, SBOM, error) { return Image{}, SBOM{}, err }
	l.Progress("Debian packages for " + arch)
	base, found, err := Debian(ctx, arch, l.Cache)
	if err != nil {
		return fail(err)
	}
	dir := l.Programs
	if dir == "" {
		if dir, err = os.MkdirTemp("", "landfall-image"); err != nil {
			return fail(err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		if err := l.build(ctx, arch, dir); err != nil {
			return fail(err)
		}
	}
	files := []File{}
	bill := SBOM{Name: "landfall-" + l.Version + "-" + arch, Version: l.Version, Created: l.Created, Purpose: "CONTAINER",
		Debian: found}
	for _, p := range programs {
		path := filepath.Join(dir, p.Name)
		content, err := os.ReadFile(path)
		if err != nil {
			return fail(err)
		}
		files = append(files, File{Path: "usr/local/bin/" + p.Name, Mode: 0o755, Content: content})
		if err := bill.AddProgram(path); err != nil {
			return fail(err)
		}
	}
	return Image{
		Arch: arch, Layers: [][]File{base, files}, Created: l.Created,
		Config: Config{
			// What needs root on a node says so in its pod: see the chart.
			User:   "65532:65532",
			Env:    []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Cmd:    []string{"landfallctl", "--help"},
			Labels: l.labels(),
		},
	}, bill, nil
}

// labels are the annotations that the OCI image specification defines.
func (l Landfall) labels() map[string]string {
	labels := map[string]string{
		"org.opencontainers.image.title":       "Landfall",
		"org.opencontainers.image.description": "Load balancer and service proxy for bare-metal Kubernetes",
		"org.opencontainers.image.licenses":    "Apache-2.0",
		"org.opencontainers.image.source":      "https://github.com/landfall-lb/landfall",
		"org.opencontainers.image.version":     l.Version,
		"org.opencontainers.image.created":     l.Created.UTC().Format(time.RFC3339),
	}
	if l.Revision != "" {
		labels["org.opencontainers.image.revision"] = l.Revision
	}
	return labels
}

// build compiles the programs into dir.
func (l Landfall) build(ctx context.Context, arch, dir string) error {
	for _, p := range programs {
		l.Progress("building " + p.Name + " for " + arch)
		if err := p.Build(ctx, l.Repository, "linux", arch, l.Version, filepath.Join(dir, p.Name)); err != nil {
			return err
		}
	}
	return nil
}

// Build compiles the program for a system and an architecture, as Go names them, and stamps a version
// into it.
func (p Program) Build(ctx context.Context, repository, system, arch, version, to string) error {
	flags := "-s -w -X github.com/landfall-lb/landfall/internal/ops.Version=" + version
	return Build(ctx, repository, system, arch, p.Package, flags, to)
}

// Build compiles a static program of a source tree for a system and an architecture. The same sources
// give the same file, wherever they are.
func Build(ctx context.Context, repository, system, arch, pkg, flags, to string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", to, pkg)
	cmd.Dir = repository
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system, "GOARCH="+arch, "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s for %s/%s: %w: %s", pkg, system, arch, err, out)
	}
	return nil
}

// Sources returns the commit of a source tree and its time, which stand for its content: of the
// variable SOURCE_DATE_EPOCH, else of git, else none. The tree may be another user's, as root builds it.
func Sources(ctx context.Context, repository string) (revision string, created time.Time, err error) {
	created = epoch
	if out, err := output(ctx, repository, "git", "-c", "safe.directory=*", "log", "-1", "--format=%H %ct"); err == nil {
		commit, seconds, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
		when, err := parseEpoch(seconds)
		if err != nil {
			return "", epoch, err
		}
		revision, created = commit, when
	}
	if text := os.Getenv("SOURCE_DATE_EPOCH"); text != "" {
		when, err := parseEpoch(text)
		if err != nil {
			return "", epoch, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
		}
		created = when
	}
	return revision, created, nil
}

func parseEpoch(text string) (time.Time, error) {
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return epoch, fmt.Errorf("%q: want seconds since 1970", text)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// Extract writes files below a folder, for those who build the image with a Dockerfile.
func Extract(files []File, to string) error {
	all, err := WithFolders(files)
	if err != nil {
		return err
	}
	for _, f := range all {
		path := filepath.Join(to, f.Path)
		switch {
		case f.Mode.IsDir():
			err = errors.Join(os.MkdirAll(path, 0o755), os.Chmod(path, f.Mode))
		case f.Mode&os.ModeSymlink != 0:
			err = os.Symlink(f.Link, path)
		default:
			err = os.WriteFile(path, f.Content, f.Mode.Perm())
		}
		if err == nil && f.Mode&os.ModeSymlink == 0 {
			err = os.Chtimes(path, epoch, epoch)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
