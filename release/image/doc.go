// Package image writes container images without a daemon, a registry or a base image: layers of
// files that are given, as an archive in the OCI image layout that docker, podman, ctr and skopeo
// read. The same files give the same digest. It makes Landfall's own image, of Go programs and a
// few Debian packages, and the images that the cluster in e2e/cluster runs.
package image
