package ops

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// writePair writes a new certificate and its key, changed at that time.
func writePair(t *testing.T, dir string, at time.Time) (cert, key string) {
	t.Helper()
	made, err := selfSigned([]string{"127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(made.PrivateKey.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: made.Certificate[0]},
		key: {Type: "EC PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

func TestCertificatesAreReadAgainWhenTheyChange(t *testing.T) {
	dir, at := t.TempDir(), time.Now()
	c, err := newCertificate(slog.New(slog.DiscardHandler), filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"),
		nil)
	if err == nil {
		t.Fatal("files that do not exist are accepted")
	}
	certFile, keyFile := writePair(t, dir, at)
	if c, err = newCertificate(slog.New(slog.DiscardHandler), certFile, keyFile, nil); err != nil {
		t.Fatal(err)
	}
	get := func() *tls.Certificate {
		c.checked = time.Time{}
		got, err := c.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	first := get()
	if get() != first {
		t.Error("a file that has not changed is read again")
	}
	writePair(t, dir, at.Add(time.Second))
	second := get()
	if second == first {
		t.Error("a new certificate is not used")
	}
	if err := os.WriteFile(certFile, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	if get() != second {
		t.Error("a broken file replaces a good certificate")
	}
}
