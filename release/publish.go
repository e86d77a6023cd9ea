package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/release/image"
)

const (
	home = "https://github.com/landfall-lb/landfall"
	// chartName is where the workflow pushes the chart.
	chartName = "ghcr.io/landfall-lb/charts/landfall"
)

// chart packages the chart. It carries the release's version as its own and as that of the image.
// Helm stamps its archive with the time of day, so its files go into another one.
func (r release) chart(ctx context.Context) error {
	folder, err := os.MkdirTemp("", "landfall-release-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	cmd := exec.CommandContext(ctx, r.Helm, "package", filepath.Join(r.Repository, "charts/landfall"),
		"--version", r.Version, "--app-version", r.Version, "--destination", folder)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("helm package: %w\n%s", err, out)
	}
	name := "landfall-" + r.Version + ".tgz"
	packed, err := os.Open(filepath.Join(folder, name))
	if err != nil {
		return err
	}
	defer packed.Close()
	out, err := os.Create(filepath.Join(r.Out, name))
	if err != nil {
		return err
	}
	defer out.Close()
	if err := r.restamp(out, packed); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return r.chartLayout(out.Name())
}

// Media types of a chart in a registry (https://helm.sh/docs/topics/registries).
const (
	typeChartConfig = "application/vnd.cncf.helm.config.v1+json"
	typeChart       = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// chartLayout writes the packaged chart once more, as an OCI image layout: what "helm push" makes of it,
// for those who fill a registry without helm.
func (r release) chartLayout(packed string) error {
	content, err := os.ReadFile(packed)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(r.Repository, "charts/landfall/Chart.yaml"))
	if err != nil {
		return err
	}
	var chart map[string]any
	if err := yaml.Unmarshal(text, &chart); err != nil {
		return fmt.Errorf("charts/landfall/Chart.yaml: %w", err)
	}
	chart["version"], chart["appVersion"] = r.Version, r.Version
	description, _ := chart["description"].(string)
	_, err = image.WriteArtifact(filepath.Join(r.Out, "landfall-chart-"+r.Version+".tar"), chartName+":"+r.Version,
		image.Artifact{
			ConfigType: typeChartConfig, Config: chart, Type: typeChart, Content: content,
			Annotations: map[string]string{
				"org.opencontainers.image.title": "landfall", "org.opencontainers.image.version": r.Version,
				"org.opencontainers.image.description": description, "org.opencontainers.image.source": home,
				"org.opencontainers.image.created": r.Time.UTC().Format(time.RFC3339),
			},
		})
	return err
}

// The manifest of a kubectl plugin (https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest).
type (
	krewPlugin struct {
		APIVersion string            `json:"apiVersion"`
		Kind       string            `json:"kind"`
		Metadata   map[string]string `json:"metadata"`
		Spec       krewSpec          `json:"spec"`
	}
	krewSpec struct {
		Version          string         `json:"version"`
		Homepage         string         `json:"homepage"`
		ShortDescription string         `json:"shortDescription"`
		Description      string         `json:"description"`
		Caveats          string         `json:"caveats"`
		Platforms        []krewPlatform `json:"platforms"`
	}
	krewPlatform struct {
		Selector krewSelector `json:"selector"`
		URI      string       `json:"uri"`
		SHA256   string       `json:"sha256"`
		Bin      string       `json:"bin"`
	}
	krewSelector struct {
		MatchLabels map[string]string `json:"matchLabels"`
	}
)

// plugin writes the manifest that makes landfallctl "kubectl landfall".
func (r release) plugin(archives []archive) error {
	manifest := krewPlugin{
		APIVersion: "krew.googlecontainertools.github.com/v1alpha2", Kind: "Plugin",
		Metadata: map[string]string{"name": "landfall"},
		Spec: krewSpec{
			Version: "v" + r.Version, Homepage: home,
			ShortDescription: "Show what the load balancer Landfall does",
			Description: "Shows Landfall's pools, the addresses of Services, who announces them, and problems.\n" +
				"Converts the objects of MetalLB.\n",
			Caveats: "If Landfall is in another namespace than landfall-system, say --landfall-namespace NAMESPACE.\n",
		},
	}
	for _, a := range archives {
		if !strings.HasPrefix(a.name, image.Landfallctl.Name+"_") {
			continue
		}
		manifest.Spec.Platforms = append(manifest.Spec.Platforms, krewPlatform{
			Selector: krewSelector{map[string]string{"os": a.platform.os, "arch": a.platform.arch}},
			URI:      fmt.Sprintf("%s/releases/download/v%s/%s", home, r.Version, a.name),
			SHA256:   a.sha256,
			Bin:      image.Landfallctl.Name + a.platform.suffix(),
		})
	}
	text, err := yaml.Marshal(manifest)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.Out, "krew-landfall.yaml"), text, 0o644)
}

// notes writes the section of the changelog that is about the version.
func (r release) notes() error {
	text, err := os.ReadFile(filepath.Join(r.Repository, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	section, err := changes(text, r.Version)
	if err != nil {
		return fmt.Errorf("CHANGELOG.md: %w", err)
	}
	return os.WriteFile(filepath.Join(r.Out, "notes.md"), section, 0o644)
}

// changes returns what stands below the heading of a version. A pre-release, whose version has a
// hyphen, has its changes below "Unreleased" or the version it leads to, until it has a heading.
func changes(changelog []byte, version string) ([]byte, error) {
	headings := []string{"## " + version}
	if core, _, pre := strings.Cut(version, "-"); pre {
		headings = append(headings, "## Unreleased", "## "+core)
	}
	for _, heading := range headings {
		found := false
		var section bytes.Buffer
		for line := range bytes.Lines(changelog) {
			if bytes.HasPrefix(line, []byte("## ")) {
				if found {
					break
				}
				title := strings.TrimSpace(string(line))
				found = title == heading || strings.HasPrefix(title, heading+" ")
				continue
			}
			if found {
				section.Write(line)
			}
		}
		if text := bytes.TrimSpace(section.Bytes()); len(text) > 0 {
			return append(text, '\n'), nil
		}
	}
	return nil, errors.New("nothing below " + strings.Join(headings, " or "))
}
