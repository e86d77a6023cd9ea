package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"
)

// File is one entry of a layer. Type, permissions, owner, link and content are kept; times and
// names of users are not.
type File struct {
	// Path has no slash at its beginning and none at its end.
	Path string
	// Mode holds the type (a regular file, [fs.ModeDir] or [fs.ModeSymlink]) and the permissions.
	Mode     fs.FileMode
	UID, GID int
	Link     string
	Content  []byte
}

// layer is a compressed layer.
type layer struct {
	blob   []byte
	diffID string // digest of what is compressed
}

// newLayer packs files, in the order of their paths, with the folders that they are in.
func newLayer(files []File, fast bool) (layer, error) {
	sum := sha256.New()
	var blob bytes.Buffer
	level := gzip.BestCompression
	if fast {
		level = gzip.BestSpeed
	}
	compressed, err := gzip.NewWriterLevel(&blob, level)
	if err != nil {
		return layer{}, err
	}
	archive := tar.NewWriter(multiWriter{compressed, sum})
	all, err := WithFolders(files)
	if err != nil {
		return layer{}, err
	}
	for _, f := range all {
		if err := f.write(archive); err != nil {
			return layer{}, fmt.Errorf("%s: %w", f.Path, err)
		}
	}
	if err := errors.Join(archive.Close(), compressed.Close()); err != nil {
		return layer{}, err
	}
	return layer{blob: blob.Bytes(), diffID: "sha256:" + hex.EncodeToString(sum.Sum(nil))}, nil
}

// multiWriter writes to two writers, the second of which never fails.
type multiWriter struct {
	first  *gzip.Writer
	second interface{ Write([]byte) (int, error) }
}

func (m multiWriter) Write(p []byte) (int, error) {
	_, _ = m.second.Write(p)
	return m.first.Write(p)
}

// WithFolders sorts files and adds the folders that are missing. Two files at one path are an
// error.
func WithFolders(files []File) ([]File, error) {
	byPath := map[string]File{}
	for _, f := range files {
		if other, ok := byPath[f.Path]; ok && (!f.Mode.IsDir() || !other.Mode.IsDir()) {
			return nil, fmt.Errorf("%s is there twice", f.Path)
		}
		if f.Path == "" || path.Clean("/"+f.Path) != "/"+f.Path {
			return nil, fmt.Errorf("path %q: want one without a slash at either end", f.Path)
		}
		byPath[f.Path] = f
	}
	var all []File
	for p, f := range byPath {
		all = append(all, f)
		for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
			if _, ok := byPath[dir]; ok {
				break
			}
			all = append(all, File{Path: dir, Mode: fs.ModeDir | 0o755})
		}
	}
	slices.SortFunc(all, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return slices.CompactFunc(all, func(a, b File) bool { return a.Path == b.Path }), nil
}

// epoch is the time of every file: a time of its own would give each build another digest.
var epoch = time.Unix(0, 0).UTC()

func (f File) write(archive *tar.Writer) error {
	header := &tar.Header{
		Format: tar.FormatPAX, Name: f.Path, ModTime: epoch, Uid: f.UID, Gid: f.GID, Mode: int64(f.Mode.Perm()),
	}
	if f.Mode&fs.ModeSticky != 0 {
		header.Mode |= 0o1000
	}
	switch f.Mode.Type() {
	case fs.ModeDir:
		header.Typeflag, header.Name = tar.TypeDir, f.Path+"/"
	case fs.ModeSymlink:
		header.Typeflag, header.Linkname = tar.TypeSymlink, f.Link
	case 0:
		header.Typeflag, header.Size = tar.TypeReg, int64(len(f.Content))
	default:
		return fmt.Errorf("type %s: want a file, a folder or a symbolic link", f.Mode.Type())
	}
	if err := archive.WriteHeader(header); err != nil {
		return err
	}
	if header.Typeflag != tar.TypeReg {
		return nil
	}
	_, err := archive.Write(f.Content)
	return err
}
