package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const version = "0.1.0-rc.1"

// makeRelease runs the program, without the race detector, under which it packs for minutes. It
// returns the folder of the release for this machine's platform.
func makeRelease(t *testing.T, program string) (out string) {
	t.Helper()
	image := filepath.Join(t.TempDir(), "landfall-image.tar")
	if err := os.WriteFile(image, []byte("image"), 0o600); err != nil {
		t.Fatal(err)
	}
	out = filepath.Join(t.TempDir(), "dist")
	execute(t, program, "--repository", "..", "--out", out, "--helm", helm(t), "--images", image,
		"--platforms", "linux/"+runtime.GOARCH, version)
	return out
}

// helm returns the program in LANDFALL_HELM, or the one that the lab builds.
func helm(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("LANDFALL_HELM"); path != "" {
		return path
	}
	return strings.TrimSpace(execute(t, "go", "run", "../e2e/cmd/landfall-lab", "tool", "helm"))
}

// execute returns what a program prints.
func execute(t *testing.T, program string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "SOURCE_DATE_EPOCH=1700000000")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v: %s", filepath.Base(program), err, stderr.String())
	}
	return string(text)
}

// unpack returns the files of a tar.gz.
func unpack(t *testing.T, path string) map[string][]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	return readTar(t, unzipped)
}

// unpackTar returns the files of a tar.
func unpackTar(t *testing.T, path string) map[string][]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return readTar(t, f)
}

func readTar(t *testing.T, from io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for in := tar.NewReader(from); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		} else if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = text
	}
}

// sums returns what checksums.txt says.
func sums(t *testing.T, folder string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, checksumsFile))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		sum, name, _ := strings.Cut(lines.Text(), "  ")
		all[name] = sum
	}
	return all
}

// TestRelease looks for the version wherever it must be, and at what belongs together.
func TestRelease(t *testing.T) {
	program := filepath.Join(t.TempDir(), "landfall-release")
	execute(t, "go", "build", "-trimpath", "-o", program, ".")
	dist := makeRelease(t, program)
	system := "_linux_" + runtime.GOARCH

	t.Run("files", func(t *testing.T) {
		want := []string{
			"krew-landfall.yaml", "landfall-" + version + ".tgz", "landfall-chart-" + version + ".tar", "landfall-image.tar",
			"notes.md",
			"landfall_" + version + system + ".tar.gz", "landfall_" + version + system + ".spdx.json",
			"landfallctl_" + version + system + ".tar.gz", "landfallctl_" + version + system + ".spdx.json",
		}
		slices.Sort(want)
		of := sums(t, dist)
		if got := slices.Sorted(maps.Keys(of)); !slices.Equal(got, want) {
			t.Fatalf("files are\n%v, want\n%v", got, want)
		}
		for name, sum := range of {
			if got, err := checksum(filepath.Join(dist, name)); err != nil || got != sum {
				t.Errorf("%s: checksum is %s (%v), checksums.txt says %s", name, got, err, sum)
			}
		}
	})

	t.Run("programs", func(t *testing.T) {
		files := unpack(t, filepath.Join(dist, "landfall_"+version+system+".tar.gz"))
		maps.Copy(files, unpack(t, filepath.Join(dist, "landfallctl_"+version+system+".tar.gz")))
		want := []string{"LICENSE", "landfall-controller", "landfall-proxy", "landfall-speaker", "landfallctl"}
		if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, want) {
			t.Fatalf("archives hold %v, want %v", got, want)
		}
		for _, name := range want[1:] {
			path := filepath.Join(t.TempDir(), name)
			if err := os.WriteFile(path, files[name], 0o700); err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command(path, "--version").CombinedOutput()
			if err != nil || !strings.Contains(string(out), version) {
				t.Errorf("%s --version: %v: %s", name, err, out)
			}
		}
	})

	t.Run("chart", func(t *testing.T) {
		files := unpack(t, filepath.Join(dist, "landfall-"+version+".tgz"))
		var chart struct{ Version, AppVersion string }
		if err := yaml.Unmarshal(files["landfall/Chart.yaml"], &chart); err != nil {
			t.Fatal(err)
		}
		if chart.Version != version || chart.AppVersion != version {
			t.Errorf("chart has version %s and appVersion %s, want %s", chart.Version, chart.AppVersion, version)
		}
		if _, ok := files["landfall/charts/crds/Chart.yaml"]; !ok {
			t.Errorf("the chart holds no CRDs: %v", slices.Sorted(maps.Keys(files)))
		}
		out, err := exec.Command(helm(t), "template", "--kube-version", "1.35.4",
			filepath.Join(dist, "landfall-"+version+".tgz"), "--set", "proxy.clusterCIDR=10.244.0.0/16").CombinedOutput()
		if err != nil || !strings.Contains(string(out), "/landfall:"+version) {
			t.Errorf("helm template: %v: no image of version %s", err, version)
		}
	})

	t.Run("chart as a layout", func(t *testing.T) {
		files := unpackTar(t, filepath.Join(dist, "landfall-chart-"+version+".tar"))
		blob := func(digest string) []byte {
			t.Helper()
			content, ok := files["blobs/sha256/"+strings.TrimPrefix(digest, "sha256:")]
			if !ok {
				t.Fatalf("there is no blob %s in %v", digest, slices.Sorted(maps.Keys(files)))
			}
			return content
		}
		type descriptor struct{ MediaType, Digest string }
		var top struct{ Manifests []descriptor }
		var manifest struct {
			Config descriptor
			Layers []descriptor
		}
		var config struct{ Name, Version, AppVersion string }
		for _, read := range []struct {
			into any
			text func() []byte
		}{
			{&top, func() []byte { return files["index.json"] }},
			{&manifest, func() []byte { return blob(top.Manifests[0].Digest) }},
			{&config, func() []byte { return blob(manifest.Config.Digest) }},
		} {
			if err := json.Unmarshal(read.text(), read.into); err != nil {
				t.Fatal(err)
			}
		}
		if len(manifest.Layers) != 1 || manifest.Layers[0].MediaType != typeChart ||
			manifest.Config.MediaType != typeChartConfig {
			t.Fatalf("manifest is %+v", manifest)
		}
		packed, err := os.ReadFile(filepath.Join(dist, "landfall-"+version+".tgz"))
		if err != nil || !bytes.Equal(packed, blob(manifest.Layers[0].Digest)) {
			t.Errorf("the layer is not the packaged chart (%v)", err)
		}
		if config.Name != "landfall" || config.Version != version || config.AppVersion != version {
			t.Errorf("configuration is %+v", config)
		}
	})

	t.Run("plugin", func(t *testing.T) {
		text, err := os.ReadFile(filepath.Join(dist, "krew-landfall.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var plugin krewPlugin
		if err := yaml.UnmarshalStrict(text, &plugin); err != nil {
			t.Fatal(err)
		}
		if len(plugin.Spec.Platforms) != 1 || plugin.Spec.Version != "v"+version {
			t.Fatalf("manifest is %s", text)
		}
		name := filepath.Base(plugin.Spec.Platforms[0].URI)
		if sum := sums(t, dist)[name]; sum == "" || sum != plugin.Spec.Platforms[0].SHA256 {
			t.Errorf("%s has checksum %q, the manifest says %q", name, sum, plugin.Spec.Platforms[0].SHA256)
		}
	})

	t.Run("bill of materials", func(t *testing.T) {
		text, err := os.ReadFile(filepath.Join(dist, "landfall_"+version+system+".spdx.json"))
		if err != nil {
			t.Fatal(err)
		}
		var doc struct {
			Packages []struct{ Name, VersionInfo string }
		}
		if err := json.Unmarshal(text, &doc); err != nil {
			t.Fatal(err)
		}
		versions := map[string]string{}
		for _, p := range doc.Packages {
			versions[p.Name] = p.VersionInfo
		}
		if versions["landfall_"+version+system] != version || versions["k8s.io/client-go"] == "" || versions["stdlib"] == "" {
			t.Errorf("packages are %v", versions)
		}
	})

	t.Run("reproducible", func(t *testing.T) {
		if a, b := sums(t, dist), sums(t, makeRelease(t, program)); !maps.Equal(a, b) {
			t.Errorf("the same tree gave\n%v and\n%v", a, b)
		}
	})
}

func TestVersions(t *testing.T) {
	for given, want := range map[string]string{
		"0.1.0": "", "0.1.0-rc.1": "", "0.1.0-5-gabc1234": "",
		"v0.1.0": "not semantic", "0.1": "not semantic", "0.1.0+x": "not semantic", "b318418": "not semantic",
		"":      "not semantic",
		"0.2.0": "change it first", "0.1.1-rc.1": "change it first",
	} {
		err := release{Version: given, Repository: "testdata"}.checkVersion()
		if got := ""; err != nil {
			got = err.Error()
			if want == "" || !strings.Contains(got, want) {
				t.Errorf("%q: %v, want %q", given, err, want)
			}
		} else if want != "" {
			t.Errorf("%q is accepted, want %q", given, want)
		}
	}
}

// TestOneVersion holds the files together that name a version.
func TestOneVersion(t *testing.T) {
	type chart struct {
		Version, AppVersion string
		Dependencies        []struct{ Version string }
	}
	read := func(path string) (c chart) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(text, &c); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		return c
	}
	main, crds := read("../charts/landfall/Chart.yaml"), read("../charts/landfall/charts/crds/Chart.yaml")
	all := []string{main.Version, main.AppVersion, main.Dependencies[0].Version, crds.Version, crds.AppVersion}
	if len(slices.Compact(all)) != 1 {
		t.Errorf("versions of the charts differ: %v", all)
	}
	text, err := os.ReadFile("../CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := changes(text, main.Version); err != nil {
		t.Errorf("CHANGELOG.md: %v", err)
	}
}

func TestChanges(t *testing.T) {
	const changelog = `# Changelog

## Unreleased

- New.

## 0.2.0 (2027-01-01)

- Second.

### Part

- More.

## 0.1.0

- First.
`
	for _, tt := range []struct{ version, want string }{
		{"0.1.0", "- First.\n"},
		{"0.2.0", "- Second.\n\n### Part\n\n- More.\n"},
		{"0.3.0-rc.1", "- New.\n"},
		{"0.3.0", ""},
		{"0.2", ""},
		{"0.1.0-rc.1", "- New.\n"},
	} {
		got, err := changes([]byte(changelog), tt.version)
		if string(got) != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("%s: %q, %v; want %q", tt.version, got, err, tt.want)
		}
	}
	released := strings.Replace(changelog, "## Unreleased\n\n- New.\n", "", 1)
	if got, err := changes([]byte(released), "0.1.0-rc.1"); string(got) != "- First.\n" {
		t.Errorf("a pre-release of 0.1.0: %q, %v", got, err)
	}
}

func TestPlatformsNamed(t *testing.T) {
	all, err := platformsNamed("")
	if err != nil || len(all) != len(platforms) {
		t.Errorf("no list: %v, %v", all, err)
	}
	two, err := platformsNamed("linux/arm64,windows/amd64")
	if err != nil || !slices.Equal(two, []platform{{"linux", "arm64"}, {"windows", "amd64"}}) {
		t.Errorf("two: %v, %v", two, err)
	}
	if _, err := platformsNamed("linux/386"); err == nil {
		t.Errorf("linux/386 is accepted")
	}
}
