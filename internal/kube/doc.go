// Package kube is the only way to the API server: watches that turn objects into lb values, and
// writers for what is reported back.
package kube
