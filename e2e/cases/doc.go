// Package cases is what a user can observe of a node's Services, as one table: a Service in some
// state, a connection, and where it ends. Each dialect walks the table through the rules that it
// plans, and runs it with real packets; the end-to-end tests ask the same of kube-proxy.
package cases
