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
	"time"

	"sigs.k8s.io/yaml"
)

const version = "0.1.0-rc.1"

// release makes one for this machine's platform.
func makeRelease(t *testing.T) release {
	t.Helper()
	helm := os.Getenv("LANDFALL_HELM")
	if helm == "" {
		out, err := exec.Command("go", "run", "../e2e/cmd/landfall-lab", "tool", "helm").Output()
		if err != nil {
			t.Fatalf("helm: %v", err)
		}
		helm = strings.TrimSpace(string(out))
	}
	image := filepath.Join(t.TempDir(), "landfall-image.tar")
	if err := os.WriteFile(image, []byte("image"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := release{
		Version: version, Repository: "..", Out: filepath.Join(t.TempDir(), "dist"), Helm: helm, Images: []string{image},
		Platforms: []platform{{"linux", runtime.GOARCH}}, Time: time.Unix(1_700_000_000, 0).UTC(),
	}
	if err := r.make(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
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
	files := map[string][]byte{}
	for in := tar.NewReader(unzipped); ; {
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
func sums(t *testing.T, r release) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(r.Out, checksumsFile))
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
	r := makeRelease(t)
	system := "_linux_" + runtime.GOARCH

	t.Run("files", func(t *testing.T) {
		want := []string{
			"krew-landfall.yaml", "landfall-" + version + ".tgz", "landfall-image.tar", "notes.md",
			"landfall_" + version + system + ".tar.gz", "landfall_" + version + system + ".spdx.json",
			"landfallctl_" + version + system + ".tar.gz", "landfallctl_" + version + system + ".spdx.json",
		}
		slices.Sort(want)
		of := sums(t, r)
		if got := slices.Sorted(maps.Keys(of)); !slices.Equal(got, want) {
			t.Fatalf("files are\n%v, want\n%v", got, want)
		}
		for name, sum := range of {
			if got, err := checksum(filepath.Join(r.Out, name)); err != nil || got != sum {
				t.Errorf("%s: checksum is %s (%v), checksums.txt says %s", name, got, err, sum)
			}
		}
	})

	t.Run("programs", func(t *testing.T) {
		files := unpack(t, filepath.Join(r.Out, "landfall_"+version+system+".tar.gz"))
		maps.Copy(files, unpack(t, filepath.Join(r.Out, "landfallctl_"+version+system+".tar.gz")))
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
		files := unpack(t, filepath.Join(r.Out, "landfall-"+version+".tgz"))
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
		out, err := exec.Command(r.Helm, "template", "--kube-version", "1.35.4",
			filepath.Join(r.Out, "landfall-"+version+".tgz"), "--set", "proxy.clusterCIDR=10.244.0.0/16").CombinedOutput()
		if err != nil || !strings.Contains(string(out), "/landfall:"+version) {
			t.Errorf("helm template: %v: no image of version %s", err, version)
		}
	})

	t.Run("plugin", func(t *testing.T) {
		text, err := os.ReadFile(filepath.Join(r.Out, "krew-landfall.yaml"))
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
		if sum := sums(t, r)[name]; sum == "" || sum != plugin.Spec.Platforms[0].SHA256 {
			t.Errorf("%s has checksum %q, the manifest says %q", name, sum, plugin.Spec.Platforms[0].SHA256)
		}
	})

	t.Run("bill of materials", func(t *testing.T) {
		text, err := os.ReadFile(filepath.Join(r.Out, "landfall_"+version+system+".spdx.json"))
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
		again := makeRelease(t)
		if a, b := sums(t, r), sums(t, again); !maps.Equal(a, b) {
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
