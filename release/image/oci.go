package image

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Image is what an image for one architecture is made of.
type Image struct {
	Arch string // as Go names it
	// Layers hold files; later ones lie over earlier ones.
	Layers [][]File
	Config Config
	// Created is in the image's configuration, and so in its digest: the time of the sources, not of
	// the build.
	Created time.Time
	// Fast compresses less, for an image that stays on this machine.
	Fast bool
}

// Config says how a container of the image runs.
type Config struct {
	User       string            `json:"User,omitempty"`
	Env        []string          `json:"Env,omitempty"`
	Entrypoint []string          `json:"Entrypoint,omitempty"`
	Cmd        []string          `json:"Cmd,omitempty"`
	WorkingDir string            `json:"WorkingDir,omitempty"`
	Labels     map[string]string `json:"Labels,omitempty"`
}

// Written is an image in an archive.
type Written struct {
	Arch   string
	Digest string   // of the manifest
	Layers []string // digests of the compressed layers
	Size   int64    // of the compressed layers
}

const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// descriptor, and what follows, are the JSON of the OCI image specification, 1.1.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Config        descriptor        `json:"config"`
	Layers        []descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type configuration struct {
	Created      time.Time `json:"created"`
	Architecture string    `json:"architecture"`
	OS           string    `json:"os"`
	Config       Config    `json:"config"`
	RootFS       rootFS    `json:"rootfs"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

// dockerEntry is an entry of manifest.json, by which "docker load" of before version 25 finds an
// image.
type dockerEntry struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// blobs are contents by their path in an archive.
type blobs map[string][]byte

func (b blobs) add(mediaType string, content []byte) descriptor {
	sum := sha256.Sum256(content)
	digest := hex.EncodeToString(sum[:])
	b["blobs/sha256/"+digest] = content
	return descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: int64(len(content))}
}

func (b blobs) addJSON(mediaType string, value any) (descriptor, error) {
	text, err := json.Marshal(value)
	return b.add(mediaType, text), err
}

// Write writes an archive in the OCI image layout that holds images of one name, one for each
// architecture.
func Write(to, name string, images ...Image) ([]Written, error) {
	contents := blobs{}
	var written []Written
	var manifests []descriptor
	var docker []dockerEntry
	for _, i := range images {
		w, d, entry, err := contents.addImage(i)
		if err != nil {
			return nil, fmt.Errorf("image for %s: %w", i.Arch, err)
		}
		entry.RepoTags = []string{name}
		written, manifests, docker = append(written, w), append(manifests, d), append(docker, entry)
	}
	top := manifests[0]
	if len(manifests) > 1 {
		var err error
		top, err = contents.addJSON(typeIndex, index{SchemaVersion: 2, MediaType: typeIndex, Manifests: manifests})
		if err != nil {
			return nil, err
		}
		docker = nil // it has no place for an architecture
	}
	return written, contents.saveLayout(to, name, top, docker)
}

// saveLayout writes an archive in the OCI image layout whose only entry is top, under a name; and
// what older versions of docker read, if it is not empty.
func (b blobs) saveLayout(to, name string, top descriptor, docker []dockerEntry) error {
	_, tag, _ := strings.Cut(name[strings.LastIndexByte(name, '/')+1:], ":")
	top.Annotations = map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag}
	files := map[string]any{
		"index.json": index{SchemaVersion: 2, MediaType: typeIndex, Manifests: []descriptor{top}},
		"oci-layout": map[string]string{"imageLayoutVersion": "1.0.0"},
	}
	if docker != nil {
		files["manifest.json"] = docker
	}
	for path, value := range files {
		text, err := json.Marshal(value)
		if err != nil {
			return err
		}
		b[path] = text
	}
	return b.save(to)
}

// addImage adds what one image consists of.
func (b blobs) addImage(i Image) (Written, descriptor, dockerEntry, error) {
	c := configuration{
		Created: i.Created.UTC(), Architecture: i.Arch, OS: "linux", Config: i.Config, RootFS: rootFS{Type: "layers"},
	}
	m := manifest{SchemaVersion: 2, MediaType: typeManifest, Annotations: i.Config.Labels}
	w := Written{Arch: i.Arch}
	var entry dockerEntry
	fail := func(err error) (Written, descriptor, dockerEntry, error) { return w, descriptor{}, entry, err }
	for _, files := range i.Layers {
		l, err := newLayer(files, i.Fast)
		if err != nil {
			return fail(err)
		}
		d := b.add(typeLayer, l.blob)
		m.Layers = append(m.Layers, d)
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, l.diffID)
		entry.Layers = append(entry.Layers, blobPath(d))
		w.Layers = append(w.Layers, d.Digest)
		w.Size += d.Size
	}
	var err error
	if m.Config, err = b.addJSON(typeConfig, c); err != nil {
		return fail(err)
	}
	entry.Config = blobPath(m.Config)
	d, err := b.addJSON(typeManifest, m)
	if err != nil {
		return fail(err)
	}
	d.Platform = &platform{Architecture: i.Arch, OS: "linux"}
	w.Digest = d.Digest
	return w, d, entry, nil
}

func blobPath(d descriptor) string { return "blobs/sha256/" + strings.TrimPrefix(d.Digest, "sha256:") }

// save writes the archive, and replaces one that is there.
func (b blobs) save(to string) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(to), filepath.Base(to)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err := errors.Join(b.write(f), f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), to)
}

func (b blobs) write(w io.Writer) error {
	archive := tar.NewWriter(w)
	for _, dir := range []string{"blobs", "blobs/sha256"} {
		if err := (File{Path: dir, Mode: fs.ModeDir | 0o755}).write(archive); err != nil {
			return err
		}
	}
	for _, path := range slices.Sorted(maps.Keys(b)) {
		if err := (File{Path: path, Mode: 0o644, Content: b[path]}).write(archive); err != nil {
			return err
		}
	}
	return archive.Close()
}
