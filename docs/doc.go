// Package docs tests the documentation.
package docs
