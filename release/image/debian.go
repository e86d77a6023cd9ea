package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Package is a Debian package that is in an image.
type Package struct{ Name, Version, Arch, Source, Maintainer, Homepage string }

// packages are what the proxy's iptables mode needs: the tools of both variants for both families,
// their extensions, and the libraries of these. Nothing else of the image calls a program.
var packages = []string{
	"base-files", "iptables", "libc6", "libip4tc2", "libip6tc2", "libmnl0", "libnetfilter-conntrack3", "libnfnetlink0",
	"libnftnl11", "libxtables12", "netbase",
}

// kept are the files of the packages that are worth their place, as patterns of path.Match.
var kept = []string{
	"etc/debian_version", "etc/os-release", "usr/lib/os-release", "etc/protocols", "etc/services",
	"usr/share/doc/*/copyright",
	"lib/*-linux-gnu/ld-linux-*", "lib64/ld-linux-*", "lib/ld-linux-*", "lib/*-linux-gnu/libc.so.*",
	"lib/*-linux-gnu/libm.so.*", "lib/*-linux-gnu/libdl.so.*", "lib/*-linux-gnu/libpthread.so.*",
	"lib/*-linux-gnu/libresolv.so.*",
	"usr/lib/*-linux-gnu/lib*.so.*", "lib/*-linux-gnu/libmnl.so.*",
	"usr/lib/*-linux-gnu/xtables/*", "usr/sbin/ip*tables*", "usr/sbin/xtables-*-multi",
}

// alternatives are the links that the package iptables makes when it is installed: which variant
// the plain names mean.
var alternatives = map[string]string{
	"iptables": "iptables-nft", "iptables-save": "iptables-nft-save", "iptables-restore": "iptables-nft-restore",
	"ip6tables": "ip6tables-nft", "ip6tables-save": "ip6tables-nft-save", "ip6tables-restore": "ip6tables-nft-restore",
}

// Debian returns the files of the packages that Landfall's image consists of, for an architecture
// of Go's name. The packages come from what this machine's apt is configured for, are kept in the
// folder cache, and are looked up again after a day. No program of them runs.
func Debian(ctx context.Context, arch, cache string) ([]File, []Package, error) {
	dir := filepath.Join(cache, "debian-"+arch)
	archives, err := fetch(ctx, arch, dir, request{names: packages})
	if err != nil {
		return nil, nil, fmt.Errorf("debian packages for %s: %w", arch, err)
	}
	var files []File
	var found []Package
	for _, archive := range archives {
		p, status, err := describe(ctx, archive)
		if err != nil {
			return nil, nil, err
		}
		found = append(found, p)
		// Where scanners for vulnerabilities look in an image without dpkg.
		files = append(files, File{Path: "var/lib/dpkg/status.d/" + p.Name, Mode: 0o644, Content: status})
		content, err := unpack(ctx, archive, isKept)
		if err != nil {
			return nil, nil, err
		}
		files = append(files, content...)
	}
	if err := isBookworm(files); err != nil {
		return nil, nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(alternatives)) {
		files = append(files, File{Path: "usr/sbin/" + name, Mode: fs.ModeSymlink | 0o777, Link: alternatives[name]})
	}
	return append(files, accounts()...), found, nil
}

// isBookworm refuses the packages of other distributions, whose libraries are not those of the list.
func isBookworm(files []File) error {
	const path = "usr/lib/os-release"
	i := slices.IndexFunc(files, func(f File) bool { return f.Path == path })
	if i < 0 {
		return fmt.Errorf("base-files has no %s", path)
	}
	text := string(files[i].Content)
	if !strings.Contains(text, "\nID=debian\n") || !strings.Contains(text, "\nVERSION_CODENAME=bookworm\n") {
		name, _, _ := strings.Cut(text, "\n")
		return fmt.Errorf("apt of this machine offers packages of %s: build in a container of Debian 12, "+
			"or set BUILDER=docker", strings.TrimPrefix(name, "PRETTY_NAME="))
	}
	return nil
}

// accounts are the users, and the folders that programs take for granted.
func accounts() []File {
	text := func(path, content string) File { return File{Path: path, Mode: 0o644, Content: []byte(content)} }
	return []File{
		text("etc/passwd", "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n"),
		text("etc/group", "root:x:0:\nnonroot:x:65532:\n"),
		text("etc/nsswitch.conf", "hosts: files dns\n"),
		{Path: "run", Mode: fs.ModeDir | 0o755},
		{Path: "tmp", Mode: fs.ModeDir | fs.ModeSticky | 0o777},
	}
}

// Root returns the files of Debian packages and of all that they depend on, for an architecture of
// Go's name, and keeps the packages in the folder dir. They come from a suite of Debian, such as
// bullseye or trixie-backports; where suite is "", from what this machine's apt is configured for.
// It is for images that nobody else gets: documentation is left out, no program of the packages
// runs, and the links are missing that their installation makes.
func Root(ctx context.Context, arch, dir, suite string, names ...string) ([]File, error) {
	archives, err := fetch(ctx, arch, dir, request{names: names, dependencies: true, suite: suite})
	if err != nil {
		return nil, fmt.Errorf("debian packages for %s: %w", arch, err)
	}
	var files []File
	for _, archive := range archives {
		content, err := unpack(ctx, archive, func(path string) bool { return !strings.HasPrefix(path, "usr/share/") })
		if err != nil {
			return nil, err
		}
		files = append(files, content...)
	}
	return append(files, accounts()...), nil
}

// fresh is how long fetched packages are taken for the newest ones.
const fresh = 24 * time.Hour

// request is what is asked of apt: packages, and what these depend on.
type request struct {
	names        []string
	dependencies bool
	suite        string // of Debian; "" for what apt is configured for
}

// fetch downloads packages into dir, and returns their archives in the order of their names.
func fetch(ctx context.Context, arch, dir string, r request) ([]string, error) {
	unlock, err := alone(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	stamp := filepath.Join(dir, "stamp")
	have, err := filepath.Glob(filepath.Join(dir, "archives", "*.deb"))
	if err != nil {
		return nil, err
	}
	info, statErr := os.Stat(stamp)
	wanted, readErr := os.ReadFile(stamp)
	complete := readErr == nil && string(wanted) == strings.Join(r.names, " ") &&
		(len(have) == len(r.names) || r.dependencies && len(have) > len(r.names))
	if complete && statErr == nil && time.Since(info.ModTime()) < fresh {
		return have, nil
	}
	fetched := fetchNow(ctx, arch, dir, r)
	if fetched != nil {
		if complete && ctx.Err() == nil { // better old packages than none, as without a network
			return have, nil
		}
		return nil, fetched
	}
	if err := os.WriteFile(stamp, []byte(strings.Join(r.names, " ")), 0o644); err != nil {
		return nil, err
	}
	return filepath.Glob(filepath.Join(dir, "archives", "*.deb"))
}

// alone waits until no other process fetches into dir: apt fails where two do. The next one comes when
// unlock is called.
func alone(ctx context.Context, dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("another process fetches packages into %s: %w", dir, ctx.Err()), f.Close())
		}
	}
}

// fetchNow asks apt for the newest packages, without a change to the machine's own state.
func fetchNow(ctx context.Context, arch, dir string, r request) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	partial := filepath.Join(dir, "archives.partial")
	if err := errors.Join(os.RemoveAll(partial), os.MkdirAll(filepath.Join(partial, "partial"), 0o755)); err != nil {
		return err
	}
	for _, d := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "status"), nil, 0o644); err != nil {
		return err
	}
	options := []string{
		"-q", "-o", "Dir::State=" + filepath.Join(dir, "state"), "-o", "Dir::Cache=" + filepath.Join(dir, "cache"),
		"-o", "Dir::State::status=" + filepath.Join(dir, "status"), "-o", "APT::Architecture=" + arch,
		"-o", "APT::Architectures=" + arch, "-o", "Acquire::Languages=none", "-o", "APT::Sandbox::User=root",
		"-o", "APT::Get::List-Cleanup=false",
	}
	if r.suite != "" {
		sources := filepath.Join(dir, "sources.list")
		if err := os.WriteFile(sources, []byte(sourcesOf(r.suite)), 0o644); err != nil {
			return err
		}
		options = append(options, "-o", "Dir::Etc::sourcelist="+sources, "-o", "Dir::Etc::sourceparts=-",
			"-o", "APT::Default-Release="+r.suite)
	}
	if _, err := output(ctx, "", "apt-get", append(slices.Clone(options), "update")...); err != nil {
		return err
	}
	command := []string{"download"}
	if r.dependencies {
		command = []string{"-o", "Dir::Cache::archives=" + partial, "--no-install-recommends", "--download-only",
			"--assume-yes", "install"}
	}
	if _, err := output(ctx, partial, "apt-get", slices.Concat(options, command, r.names)...); err != nil {
		return err
	}
	archives := filepath.Join(dir, "archives")
	return errors.Join(os.RemoveAll(archives), os.Rename(partial, archives))
}

// sourcesOf returns apt's list of sources for a suite of Debian. Backports, such as trixie-backports, have
// a few packages that are newer, and need the others of their release.
func sourcesOf(suite string) string {
	const line = "deb http://deb.debian.org/debian %s main\n"
	text := fmt.Sprintf(line, suite)
	if release, ok := strings.CutSuffix(suite, "-backports"); ok {
		text += fmt.Sprintf(line, release)
	}
	return text
}

// describe returns what a package says of itself.
func describe(ctx context.Context, archive string) (p Package, status []byte, err error) {
	status, err = output(ctx, "", "dpkg-deb", "--field", archive)
	if err != nil {
		return p, nil, err
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(status)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && !strings.HasPrefix(line, " ") {
			fields[name] = value
		}
	}
	p = Package{Name: fields["Package"], Version: fields["Version"], Arch: fields["Architecture"],
		Source: fields["Source"], Maintainer: fields["Maintainer"], Homepage: fields["Homepage"]}
	if p.Name == "" || p.Version == "" {
		return p, nil, fmt.Errorf("%s has no name or version", archive)
	}
	return p, status, nil
}

// unpack returns the files of a package that are kept.
func unpack(ctx context.Context, archive string, keep func(path string) bool) ([]File, error) {
	text, err := output(ctx, "", "dpkg-deb", "--fsys-tarfile", archive)
	if err != nil {
		return nil, err
	}
	var files []File
	for r := tar.NewReader(bytes.NewReader(text)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", archive, err)
		}
		f := File{Path: strings.Trim(path.Clean("/"+h.Name), "/"), Mode: h.FileInfo().Mode(), Link: h.Linkname}
		f.Mode = f.Mode.Type() | f.Mode.Perm()
		if f.Mode.IsDir() || !keep(f.Path) {
			continue
		}
		switch h.Typeflag {
		case tar.TypeLink: // in the same package
			f.Mode, f.Link = fs.ModeSymlink|0o777, path.Clean("/"+h.Linkname)
		case tar.TypeReg:
			if f.Content, err = io.ReadAll(r); err != nil {
				return nil, fmt.Errorf("%s: %s: %w", archive, f.Path, err)
			}
		}
		files = append(files, f)
	}
}

func isKept(p string) bool {
	return slices.ContainsFunc(kept, func(pattern string) bool {
		ok, err := path.Match(pattern, p)
		return err == nil && ok
	})
}

// output runs a program and returns what it prints.
func output(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", name, args[len(args)-1], err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}
