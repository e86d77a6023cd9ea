package main

import (
	"io/fs"
	"maps"
	"path/filepath"
	"strings"
	"testing"
)

// Every benchmark has a limit, or something that it is compared with, and what bounds it.
func TestBounds(t *testing.T) {
	used := map[string]bool{}
	for folder, names := range allBenchmarks(t) {
		for _, name := range names {
			b := benchmark{Package: folder, Name: name}
			if b.Name == "MetalLB" { // whose parts are compared with one benchmark each
				b.Name = "MetalLB/crash"
			}
			if got := b.bound(); got.limit == "" || got.by == "" {
				t.Errorf("Benchmark%s of %s: %+v", name, folder, got)
			}
			used[folder], used[folder+" "+name] = true, true
		}
	}
	for folder := range goBounds {
		if !used[folder] {
			t.Errorf("%s has no benchmark", folder)
		}
	}
	for name := range labBounds {
		if name, _, _ = strings.Cut(name, "/"); !used[labPackage+" "+name] {
			t.Errorf("there is no Benchmark%s", name)
		}
	}
	// The longest name counts, and a name is not that of another which begins so.
	for name, want := range map[string]string{
		"PathLostL2/routes": "PathLostL2", "CrashWithEndpoints": "CrashWithEndpoints", "Crash/freeze/workers=3": "Crash",
		"NewService/ahead=0": "NewService/ahead=0", "NewService/ahead=16": "NewService",
	} {
		if got := (benchmark{Package: labPackage, Name: name}).bound(); got != labBounds[want] {
			t.Errorf("%s has %+v, want that of %s", name, got, want)
		}
	}
}

// allBenchmarks returns the benchmarks of the repository that make bench runs, by their folders.
func allBenchmarks(t *testing.T) map[string][]string {
	t.Helper()
	const root = "../.."
	all := map[string][]string{labPackage: benchmarksOf(t, filepath.Join(root, labPackage))}
	for _, top := range []string{"api", "controller", "ctl", "internal", "proxy", "speaker"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, "_test.go") {
				folder := strings.TrimPrefix(filepath.Dir(path), root+"/")
				all[folder] = append(all[folder], benchmarksIn(t, path)...)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	maps.DeleteFunc(all, func(_ string, names []string) bool { return len(names) == 0 })
	return all
}
