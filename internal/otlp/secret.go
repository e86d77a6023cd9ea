package otlp

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
	"time"
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
	lines := append(bytes.TrimSpace(text), "\r\n\r\n"...)
	headers, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(lines))).ReadMIMEHeader()
	if err != nil && len(bytes.TrimSpace(text)) > 0 {
		return nil, fmt.Errorf("read %s: each line has to be a header such as Authorization: Bearer TOKEN",
			filepath.Join(dir, headersFile))
	}
	return http.Header(headers), nil
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
