package lab

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

// published is where a project publishes a program for one version and architecture.
type published struct {
	URL string
	// Sums is the URL of a file that has the SHA-256 of what is at URL: alone, or in a line with the
	// name of the file.
	Sums string
	// Member is the program's path in the archive (.tar.gz) at URL; empty if URL is the program.
	Member string
}

const (
	// connectTimeout is short: a machine that cannot reach the network builds, and should not wait.
	connectTimeout  = 3 * time.Second
	answerTimeout   = 10 * time.Second
	downloadTimeout = 3 * time.Minute
	// offlineVariable keeps the lab from downloading programs when it is set.
	offlineVariable = "LANDFALL_OFFLINE"
)

// downloads is the HTTP client for published programs. It honours HTTPS_PROXY and the like.
var downloads = &http.Client{Transport: &http.Transport{
	Proxy:                 http.ProxyFromEnvironment,
	DialContext:           (&net.Dialer{Timeout: connectTimeout}).DialContext,
	TLSHandshakeTimeout:   connectTimeout,
	ResponseHeaderTimeout: answerTimeout,
}}

// download puts the published program at the path to, once its checksum is right. It says every few
// seconds how far it is.
func (p published) download(ctx context.Context, to, what string, progress func(string)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, downloadTimeout,
		fmt.Errorf("not complete after %s", seconds(downloadTimeout)))
	defer cancel()
	want, err := p.checksum(ctx)
	if err != nil {
		return fmt.Errorf("checksum: %w", err)
	}
	archive := to + ".download"
	defer func() { _ = os.Remove(archive) }() // it has been renamed if all went well
	got, err := p.save(ctx, archive, what, progress)
	if err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("%s has the SHA-256 checksum %s, and %s says %s", p.URL, got, p.Sums, want)
	}
	if p.Member != "" {
		return extract(archive, p.Member, to)
	}
	return errors.Join(os.Chmod(archive, 0o755), os.Rename(archive, to))
}

// get asks for a page.
func get(ctx context.Context, url string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := downloads.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return resp, nil
}

// checksum returns the published SHA-256, in hexadecimal digits.
func (p published) checksum(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	resp, err := get(ctx, p.Sums)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(io.LimitReader(resp.Body, 1<<20))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 || len(fields) > 1 && strings.TrimPrefix(fields[1], "*") != path.Base(p.URL) {
			continue
		}
		if sum, err := hex.DecodeString(fields[0]); err == nil && len(sum) == sha256.Size {
			return strings.ToLower(fields[0]), nil
		}
	}
	return "", errors.Join(lines.Err(), fmt.Errorf("%s has no SHA-256 checksum of %s", p.Sums, path.Base(p.URL)))
}

// save writes what is at the URL to a file and returns its checksum.
func (p published) save(ctx context.Context, to, what string, progress func(string)) (sum string, err error) {
	resp, err := get(ctx, p.URL)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	out, err := os.Create(to)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	hash := sha256.New()
	var have counter
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.MultiWriter(out, hash, &have), resp.Body)
		done <- err
	}()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	const megabyte = 1_000_000
	for {
		select {
		case err := <-done:
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			if err != nil {
				return "", fmt.Errorf("%s: %w", p.URL, err)
			}
			return hex.EncodeToString(hash.Sum(nil)), nil
		case <-tick.C:
			progress(fmt.Sprintf("%s: %d of %d MB", what, have.bytes.Load()/megabyte, resp.ContentLength/megabyte))
		}
	}
}

// counter counts what is written to it.
type counter struct{ bytes atomic.Int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.bytes.Add(int64(len(p)))
	return len(p), nil
}

// extract writes a member of an archive to a file that can be executed.
func extract(archive, member, to string) error {
	in, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer in.Close()
	unzipped, err := gzip.NewReader(in)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(archive), err)
	}
	for files := tar.NewReader(unzipped); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("the archive has no %s", member)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(archive), err)
		}
		if path.Clean(header.Name) != member {
			continue
		}
		out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, files)
		return errors.Join(err, out.Close())
	}
}
