package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cache"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// The sources of a program, compiled twice into different folders and packed in another order of
// files, give the same layers, the same digests and the same archive.
func TestTheSameInputGivesTheSameDigest(t *testing.T) {
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	build := func(reverse bool) ([]Written, []byte) {
		dir := t.TempDir()
		program := filepath.Join(dir, "pause")
		if err := Build(t.Context(), repository, "linux", runtime.GOARCH, "./e2e/cluster/pause", "-s -w", program); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		files := append(accounts(), File{Path: "usr/local/bin/pause", Mode: 0o755, Content: content})
		if reverse {
			slices.Reverse(files)
		}
		archive := filepath.Join(dir, "image.tar")
		written, err := Write(archive, "landfall.test/pause:1", Image{
			Arch: runtime.GOARCH, Layers: [][]File{files}, Created: time.Unix(1700000000, 0),
			Config: Config{User: "65532", Labels: map[string]string{"a": "1", "b": "2", "c": "3"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(archive)
		if err != nil {
			t.Fatal(err)
		}
		return written, text
	}
	first, firstArchive := build(false)
	second, secondArchive := build(true)
	if !reflect.DeepEqual(first, second) {
		t.Errorf("two builds of the same sources:\n%+v\n%+v", first, second)
	}
	if !bytes.Equal(firstArchive, secondArchive) {
		t.Error("the archives differ")
	}
}

// TestTheWholeImageTwice makes Landfall's image twice, out of Debian's packages and of programs compiled
// in different folders: archive and bill of materials are the same, byte by byte.
func TestTheWholeImageTwice(t *testing.T) {
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	packages, err := cache.Folder()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Debian(t.Context(), runtime.GOARCH, packages); err != nil {
		t.Skip("this machine has no packages of Debian 12:", err)
	}
	build := func() [][]byte {
		dir := t.TempDir()
		for _, p := range programs { // a small one in place of each, as compiling them takes minutes
			if err := Build(t.Context(), repository, "linux", runtime.GOARCH, "./e2e/cluster/pause", "-s -w",
				filepath.Join(dir, p.Name)); err != nil {
				t.Fatal(err)
			}
		}
		l := Landfall{Repository: repository, Cache: packages, Programs: dir, Version: "1", Revision: "abc",
			Created: time.Unix(1700000000, 0), Progress: func(string) {}}
		made, bill, err := l.Image(t.Context(), runtime.GOARCH)
		if err != nil {
			t.Fatal(err)
		}
		made.Fast = true
		archive, materials := filepath.Join(dir, "image.tar"), filepath.Join(dir, "image.spdx.json")
		if _, err := Write(archive, "landfall.test/landfall:1", made); err != nil {
			t.Fatal(err)
		}
		if err := bill.Write(materials); err != nil {
			t.Fatal(err)
		}
		var files [][]byte
		for _, file := range []string{archive, materials} {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, content)
		}
		return files
	}
	first, second := build(), build()
	for i, what := range []string{"archives", "bills of materials"} {
		if !bytes.Equal(first[i], second[i]) {
			t.Errorf("the %s differ", what)
		}
	}
}

// What is in an archive hangs together as the OCI image specification has it, for two
// architectures.
func TestArchive(t *testing.T) {
	name := "landfall.test/landfall:1"
	file := File{Path: "bin/a", Mode: 0o755, Content: []byte("a")}
	path := filepath.Join(t.TempDir(), "image.tar")
	written, err := Write(path, name, Image{Arch: "amd64", Layers: [][]File{{file}}, Config: Config{User: "1"}},
		Image{Arch: "arm64", Layers: [][]File{{file}, accounts()}})
	if err != nil {
		t.Fatal(err)
	}
	contents := readArchive(t, path)
	for path, content := range contents {
		sum := sha256.Sum256(content)
		if digest, ok := strings.CutPrefix(path, "blobs/sha256/"); ok && digest != "" &&
			digest != hex.EncodeToString(sum[:]) {
			t.Errorf("%s holds something else", path)
		}
	}
	var top, list index
	decode(t, contents["index.json"], &top)
	if got := top.Manifests[0].Annotations["io.containerd.image.name"]; got != name {
		t.Errorf("name %q, want %q", got, name)
	}
	decode(t, contents[blobPath(top.Manifests[0])], &list)
	for i, d := range list.Manifests {
		var m manifest
		var c configuration
		decode(t, contents[blobPath(d)], &m)
		decode(t, contents[blobPath(m.Config)], &c)
		if d.Platform.Architecture != c.Architecture || d.Digest != written[i].Digest {
			t.Errorf("manifest %d is %+v, its configuration %+v", i, d, c)
		}
		for j, l := range m.Layers {
			unpacked, err := gzip.NewReader(bytes.NewReader(contents[blobPath(l)]))
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(unpacked)
			if err != nil {
				t.Fatal(err)
			}
			if sum := sha256.Sum256(text); c.RootFS.DiffIDs[j] != "sha256:"+hex.EncodeToString(sum[:]) {
				t.Errorf("layer %d of %s: the configuration names another content", j, c.Architecture)
			}
		}
	}
}

func TestLayer(t *testing.T) {
	l, err := newLayer([]File{
		{Path: "usr/bin/b", Mode: fs.ModeSymlink | 0o777, Link: "a"},
		{Path: "usr/bin/a", Mode: 0o755, Content: []byte("program")},
		{Path: "tmp", Mode: fs.ModeDir | fs.ModeSticky | 0o777},
	}, true)
	if err != nil {
		t.Fatal(err)
	}
	unpacked, err := gzip.NewReader(bytes.NewReader(l.blob))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for r := tar.NewReader(unpacked); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		got = append(got, h.FileInfo().Mode().String()+" "+h.Name+" "+h.Linkname)
		if !h.ModTime.Equal(epoch) {
			t.Errorf("%s is of %s", h.Name, h.ModTime)
		}
	}
	want := []string{"dtrwxrwxrwx tmp/ ", "drwxr-xr-x usr/ ", "drwxr-xr-x usr/bin/ ", "-rwxr-xr-x usr/bin/a ",
		"Lrwxrwxrwx usr/bin/b a"}
	if !slices.Equal(got, want) {
		t.Errorf("a layer of\n%q\nwant\n%q", got, want)
	}
}

func TestFilesThatCannotBePacked(t *testing.T) {
	for name, files := range map[string][]File{
		"twice":    {{Path: "a", Mode: 0o644}, {Path: "a", Mode: 0o755}},
		"absolute": {{Path: "/a", Mode: 0o644}},
		"outside":  {{Path: "../a", Mode: 0o644}},
		"device":   {{Path: "a", Mode: fs.ModeDevice}},
		"folder":   {{Path: "a/", Mode: fs.ModeDir}},
		"empty":    {{}},
	} {
		if _, err := newLayer(files, true); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// The files that the proxy's iptables mode needs are kept, and not what comes with them.
func TestWhatIsKeptOfPackages(t *testing.T) {
	for path, want := range map[string]bool{
		"usr/sbin/iptables-nft-save": true, "usr/sbin/ip6tables-legacy-restore": true, "usr/sbin/xtables-nft-multi": true,
		"usr/lib/x86_64-linux-gnu/xtables/libxt_comment.so": true, "usr/lib/aarch64-linux-gnu/libxtables.so.12": true,
		"lib64/ld-linux-x86-64.so.2": true, "lib/ld-linux-aarch64.so.1": true, "lib/aarch64-linux-gnu/libc.so.6": true,
		"usr/share/doc/iptables/copyright": true, "usr/share/man/man8/iptables.8.gz": false,
		"usr/lib/x86_64-linux-gnu/gconv/UTF-16.so": false, "sbin/ldconfig": false, "etc/profile": false,
	} {
		if got := isKept(path); got != want {
			t.Errorf("%s: kept %v, want %v", path, got, want)
		}
	}
}

// The bill of materials names the modules of a program, each once, and says where to look them up.
func TestBillOfMaterials(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bill := SBOM{Name: "landfall-1-amd64", Version: "1", Created: epoch,
		Debian: []Package{{Name: "libc6", Version: "2.36-9+deb12u14", Arch: "amd64", Maintainer: "GNU Libc Maintainers"}}}
	for range 2 {
		if err := bill.AddProgram(self); err != nil {
			t.Fatal(err)
		}
	}
	d := bill.document()
	ids := map[string]string{}
	for _, p := range d.Packages {
		if _, ok := ids[p.ID]; ok {
			t.Errorf("%s is there twice", p.ID)
		}
		ids[p.ID] = ""
		if len(p.Refs) > 0 {
			ids[p.ID] = p.Refs[0].Locator
		}
	}
	if got := ids["SPDXRef-Debian-libc6"]; got != "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64" {
		t.Errorf("libc6 is %q", got)
	}
	if got := ids["SPDXRef-Go-stdlib"]; !strings.Contains(got, runtime.Version()) {
		t.Errorf("Go's library is %q", got)
	}
	if !reflect.DeepEqual(d, bill.document()) || len(d.Relations) != len(d.Packages) {
		t.Error("the document differs from one call to the next")
	}
}

func TestSources(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "86400")
	if _, created, err := Sources(t.Context(), t.TempDir()); err != nil || created.Unix() != 86400 {
		t.Errorf("sources of %s: %v", created, err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if _, _, err := Sources(t.Context(), t.TempDir()); err == nil {
		t.Error("no error")
	}
}

// Backports alone have too few packages.
func TestSourcesOfASuite(t *testing.T) {
	for suite, want := range map[string]string{
		"trixie": "deb http://deb.debian.org/debian trixie main\n",
		"trixie-backports": "deb http://deb.debian.org/debian trixie-backports main\n" +
			"deb http://deb.debian.org/debian trixie main\n",
	} {
		if got := sourcesOf(suite); got != want {
			t.Errorf("%s: %q, want %q", suite, got, want)
		}
	}
}

func TestExtract(t *testing.T) {
	to := t.TempDir()
	if err := Extract(append(accounts(), File{Path: "usr/sbin/a", Mode: 0o755, Content: []byte("x")},
		File{Path: "usr/sbin/b", Mode: fs.ModeSymlink | 0o777, Link: "a"}), to); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(to, "usr/sbin/b")); err != nil || string(text) != "x" {
		t.Errorf("%q, %v", text, err)
	}
	if info, err := os.Stat(filepath.Join(to, "tmp")); err != nil || info.Mode()&fs.ModeSticky == 0 {
		t.Errorf("tmp: %v, %v", info, err)
	}
}

func readArchive(t *testing.T, path string) map[string][]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	contents := map[string][]byte{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return contents
		} else if err != nil {
			t.Fatal(err)
		}
		if contents[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

func decode(t *testing.T, text []byte, to any) {
	t.Helper()
	if err := json.Unmarshal(text, to); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// Two builds at a time wait for one another, as apt refuses to work twice in one folder.
func TestOneFetchAtATime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "debian")
	unlock, err := alone(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := alone(over, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("while another one fetches: %v", err)
	}
	var second error
	done := make(chan struct{})
	go func() {
		defer close(done)
		var free func()
		if free, second = alone(t.Context(), dir); second == nil {
			free()
		}
	}()
	unlock()
	if <-done; second != nil {
		t.Errorf("after the first: %v", second)
	}
}
