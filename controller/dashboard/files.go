package dashboard

import (
	_ "embed"
	"net/http"
)

// file is a part of the page.
type file struct {
	kind string
	text string
}

func (f file) write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", f.kind)
	_, _ = w.Write([]byte(f.text)) // the client has gone
}

var (
	//go:embed page/index.html
	indexHTML string
	//go:embed page/page.css
	pageCSS string
	//go:embed page/page.js
	pageJS string
	//go:embed page/icon.svg
	iconSVG string

	index = file{"text/html; charset=utf-8", indexHTML}
	files = map[string]file{
		"page.css": {"text/css; charset=utf-8", pageCSS},
		"page.js":  {"text/javascript; charset=utf-8", pageJS},
		"icon.svg": {"image/svg+xml", iconSVG},
	}
)

// policy lets the page load its own files, and ask its own origin for data; nothing else, and no
// script or style that is written into it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// secured sets what browsers keep to. Data are of the moment, and are kept nowhere.
func secured(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"Content-Security-Policy":      policy,
			"X-Content-Type-Options":       "nosniff",
			"X-Frame-Options":              "DENY",
			"Referrer-Policy":              "no-referrer",
			"Cross-Origin-Opener-Policy":   "same-origin",
			"Cross-Origin-Resource-Policy": "same-origin",
			"Cache-Control":                "no-store",
		} {
			w.Header().Set(name, value)
		}
		next.ServeHTTP(w, r)
	})
}
