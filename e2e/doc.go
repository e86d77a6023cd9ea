// Package e2e holds the end-to-end tests, which run in the lab of package lab: a real API server,
// nodes as network namespaces.
package e2e
