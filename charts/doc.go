// Package charts tests the Helm chart.
package charts
