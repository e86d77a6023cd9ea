package otlp

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
)

// The files of Options.SecretDir.
const (
	authoritiesFile = "ca.crt"
	headersFile     = "headers"
)

// trust has client trust the certificates in the directory, or the system's if it has none.
func (e *Exporter) trust() error {
	text, err := readOptional(e.secretDir, authoritiesFile)
	if err != nil || bytes.Equal(text, e.authorities) {
		return err
	}
	var pool *x509.CertPool
	if text != nil {
		if pool = x509.NewCertPool(); !pool.AppendCertsFromPEM(text) {
			return fmt.Errorf("read %s: no certificate in PEM is in it", filepath.Join(e.secretDir, authoritiesFile))
		}
	}
	e.client.CloseIdleConnections()
	e.client.Transport, e.authorities = newTransport(pool), text
	return nil
}

// newTransport returns one that keeps a connection, and trusts the system's authorities if pool is nil.
func newTransport(pool *x509.CertPool) *http.Transport {
	return &http.Transport{MaxConnsPerHost: 1, IdleConnTimeout: time.Minute, Proxy: http.ProxyFromEnvironment,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}}
}

// readHeaders returns the headers in the directory. Errors do not show them, as they may be secrets.
func readHeaders(dir string) (http.Header, error) {
	text, err := readOptional(dir, headersFile)
	if err != nil {
		return nil, err
	}
	headers, err := parseHeaders(text)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", filepath.Join(dir, headersFile), err)
	}
	return headers, nil
}

func parseHeaders(text []byte) (http.Header, error) {
	headers := http.Header{}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		name, value, found := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		if !found || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return nil, errors.New("each line has to be a header such as Authorization: Bearer TOKEN")
		}
		headers.Add(name, value)
	}
	return headers, nil
}

// readOptional returns what a file has, and nil if there is none.
func readOptional(dir, name string) ([]byte, error) {
	if dir == "" {
		return nil, nil
	}
	text, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}
