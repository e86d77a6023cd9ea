package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/landfall-lb/landfall/e2e/cache"
	"github.com/landfall-lb/landfall/release/image"
)

// Names of the images that nodes have. Nothing is ever pulled.
const (
	// ImageRepository and ImageTag name Landfall's image.
	ImageRepository = "landfall.test/landfall"
	ImageTag        = "cluster"
	// PodImage is a server that says which pod it is: the lab's.
	PodImage = "landfall.test/pod:cluster"

	// PauseImage is what holds the namespaces of pods.
	PauseImage = "landfall.test/pause:cluster"

	coreDNSImage = "landfall.test/coredns:cluster"
)

// programsVariable names the folder with programs that are built: static ones, as "make build"
// does.
const programsVariable = "LANDFALL_PROGRAMS"

// Image is the name of Landfall's image.
const Image = ImageRepository + ":" + ImageTag

// buildImages writes the archives that the nodes import, into the cache folder.
func (c *Cluster) buildImages(ctx context.Context, repository string) (_ []string, err error) {
	kept, err := cache.Folder()
	if err != nil {
		return nil, err
	}
	folder := filepath.Join(kept, "images")
	programs, err := os.MkdirTemp("", "landfall-cluster")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(programs)) }()
	archives := []string{}
	add := func(file, name string, made image.Image) error {
		made.Fast = true
		archives = append(archives, filepath.Join(folder, file))
		_, err := image.Write(archives[len(archives)-1], name, made)
		return err
	}
	one := func(file, name, program string) error {
		content, err := os.ReadFile(program)
		if err != nil {
			return err
		}
		path := "/" + filepath.Base(program)
		return add(file, name, image.Image{
			Arch:   runtime.GOARCH,
			Layers: [][]image.File{{{Path: path[1:], Mode: 0o755, Content: content}}},
			Config: image.Config{User: "65532:65532", Entrypoint: []string{path}},
		})
	}
	for _, p := range []struct{ pkg, name, file, image string }{
		{"./e2e/cluster/pause", "pause", "pause.tar", PauseImage},
		{"./e2e/cmd/landfall-lab", "landfall-lab", "pod.tar", PodImage},
	} {
		to := filepath.Join(programs, p.name)
		if built := os.Getenv(programsVariable); built != "" && p.name != "pause" {
			to = filepath.Join(built, p.name)
		} else if err := image.Build(ctx, repository, "linux", runtime.GOARCH, p.pkg, "-s -w", to); err != nil {
			return nil, err
		}
		c.options.Progress("image " + p.image)
		if err := one(p.file, p.image, to); err != nil {
			return nil, err
		}
	}
	if err := one("coredns.tar", coreDNSImage, c.tools.coredns); err != nil {
		return nil, err
	}
	if c.options.Image != "" {
		archive, err := filepath.Abs(c.options.Image)
		return append(archives, archive), err
	}
	c.options.Progress("image " + Image)
	landfall := image.Landfall{
		Repository: repository, Cache: kept, Programs: os.Getenv(programsVariable), Version: ImageTag,
		Progress: c.options.Progress,
	}
	if landfall.Revision, landfall.Created, err = image.Sources(ctx, repository); err != nil {
		return nil, err
	}
	made, _, err := landfall.Image(ctx, runtime.GOARCH)
	if err != nil {
		return nil, fmt.Errorf("image of Landfall: %w", err)
	}
	return archives, add("landfall.tar", Image, made)
}
