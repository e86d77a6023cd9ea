package ops

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
)

// validity is how long a certificate is valid that the program makes at its start: longer than any
// program runs.
const validity = 10 * 365 * 24 * time.Hour

// checkEvery is how often a connection looks whether the files have changed.
const checkEvery = time.Second

// certificate is what the metrics server shows to clients: one from files, or one of its own.
type certificate struct {
	log               *slog.Logger
	certFile, keyFile string // empty for a certificate of its own

	mu       sync.Mutex
	current  *tls.Certificate
	read     [2]time.Time // when the files that current comes from were changed
	checked  time.Time
	failures loop.Failures
}

// newCertificate reads the files, or makes a certificate for these hosts if there are none.
func newCertificate(log *slog.Logger, certFile, keyFile string, hosts []string) (*certificate, error) {
	c := &certificate{log: log, certFile: certFile, keyFile: keyFile}
	if certFile == "" && keyFile == "" {
		made, err := selfSigned(hosts)
		c.current = made
		return c, err
	}
	if certFile == "" || keyFile == "" {
		return nil, Usagef("--metrics-cert-file and --metrics-key-file need one another")
	}
	if err := c.load(); err != nil {
		return nil, fmt.Errorf("--metrics-cert-file: %w", err)
	}
	return c, nil
}

// get returns the certificate for a connection. It reads files anew that have changed, and keeps
// the last good certificate while they are not valid.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.certFile != "" && time.Since(c.checked) >= checkEvery {
		c.checked = time.Now()
		c.failures.Log(c.log, "cannot read the certificate of the metrics server; it keeps the last one",
			"read the certificate of the metrics server again", c.load())
	}
	return c.current, nil
}

// load reads the files if they have changed.
func (c *certificate) load() error {
	var changed [2]time.Time
	for i, file := range []string{c.certFile, c.keyFile} {
		info, err := os.Stat(file)
		if err != nil {
			return err
		}
		changed[i] = info.ModTime()
	}
	if c.current != nil && changed == c.read {
		return nil
	}
	read, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("%s and %s: %w", c.certFile, c.keyFile, err)
	}
	c.current, c.read = &read, changed
	return nil
}

// selfSigned makes a certificate that proves nothing: it only encrypts.
func selfSigned(hosts []string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: new(big.Int).SetUint64(uint64(now.UnixNano())), Subject: pkix.Name{CommonName: "landfall"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(validity),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// config returns the settings of TLS. There is no HTTP/2: a connection is one request at a time, so
// that limits of connections are limits of requests.
func (c *certificate) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get, NextProtos: []string{"http/1.1"}}
}
