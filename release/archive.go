package main

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// An archive holds programs for a platform.
type archive struct {
	platform platform
	// name is the file's, sha256 the checksum in hexadecimal.
	name, sha256 string
}

// pack writes files into an archive: zip for Windows, else tar with gzip.
func (r release) pack(name string, p platform, files []string) (archive, error) {
	write := r.writeTar
	if p.os == "windows" {
		name, write = name+".zip", r.writeZip
	} else {
		name += ".tar.gz"
	}
	path := filepath.Join(r.Out, name)
	f, err := os.Create(path)
	if err != nil {
		return archive{}, err
	}
	defer f.Close()
	if err := write(f, files); err != nil {
		return archive{}, fmt.Errorf("%s: %w", name, err)
	}
	if err := f.Close(); err != nil {
		return archive{}, err
	}
	sum, err := checksum(path)
	return archive{platform: p, name: name, sha256: sum}, err
}

func (r release) writeTar(w io.Writer, files []string) error {
	return writeTarGz(w, func(out *tar.Writer) error {
		for _, path := range files {
			text, mode, err := read(path)
			if err != nil {
				return err
			}
			if err := r.addFile(out, filepath.Base(path), mode, text); err != nil {
				return err
			}
		}
		return nil
	})
}

// restamp copies an archive, with the release's time for each file.
func (r release) restamp(w io.Writer, from io.Reader) error {
	unzipped, err := gzip.NewReader(from)
	if err != nil {
		return err
	}
	return writeTarGz(w, func(out *tar.Writer) error {
		for in := tar.NewReader(unzipped); ; {
			header, err := in.Next()
			if errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			text, err := io.ReadAll(in)
			if err != nil {
				return err
			}
			if err := r.addFile(out, header.Name, header.Mode, text); err != nil {
				return err
			}
		}
	})
}

// writeTarGz writes an archive that fill fills.
func writeTarGz(w io.Writer, fill func(*tar.Writer) error) error {
	zipped := gzip.NewWriter(w)
	out := tar.NewWriter(zipped)
	if err := fill(out); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return zipped.Close()
}

func (r release) addFile(out *tar.Writer, name string, mode int64, text []byte) error {
	err := out.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(text)), ModTime: r.Time, Format: tar.FormatUSTAR,
	})
	if err != nil {
		return err
	}
	_, err = out.Write(text)
	return err
}

func (r release) writeZip(w io.Writer, files []string) error {
	out := zip.NewWriter(w)
	for _, path := range files {
		text, _, err := read(path)
		if err != nil {
			return err
		}
		header := &zip.FileHeader{Name: filepath.Base(path), Method: zip.Deflate, Modified: r.Time}
		entry, err := out.CreateHeader(header)
		if err != nil {
			return err
		}
		if _, err := entry.Write(text); err != nil {
			return err
		}
	}
	return out.Close()
}

// read returns a file and its mode, which is 0755 or 0644: who made it had a umask of their own.
func read(path string) (text []byte, mode int64, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, 0, err
	}
	mode = 0o644
	if info.Mode()&0o100 != 0 {
		mode = 0o755
	}
	text, err = os.ReadFile(path)
	return text, mode, err
}

// checksum returns the SHA-256 of a file in hexadecimal.
func checksum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

const checksumsFile = "checksums.txt"

// checksums writes the SHA-256 of every file, as sha256sum does and reads it.
func (r release) checksums() error {
	entries, err := os.ReadDir(r.Out)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, entry := range entries {
		sum, err := checksum(filepath.Join(r.Out, entry.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", sum, entry.Name())
	}
	return os.WriteFile(filepath.Join(r.Out, checksumsFile), []byte(text.String()), 0o644)
}

// images copies what was made elsewhere.
func (r release) images() error {
	for _, path := range r.Images {
		text, err := os.Open(path)
		if err != nil {
			return err
		}
		defer text.Close()
		out, err := os.Create(filepath.Join(r.Out, filepath.Base(path)))
		if err != nil {
			return err
		}
		defer out.Close()
		if _, err := io.Copy(out, text); err != nil {
			return err
		}
		if err := out.Close(); err != nil {
			return err
		}
	}
	return nil
}
