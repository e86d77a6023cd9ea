package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The parts of SPDX 2.3 (https://spdx.github.io/spdx-spec/v2.3) that a bill of Go programs needs.
type (
	spdxDocument struct {
		SPDXVersion       string             `json:"spdxVersion"`
		DataLicense       string             `json:"dataLicense"`
		ID                string             `json:"SPDXID"`
		Name              string             `json:"name"`
		DocumentNamespace string             `json:"documentNamespace"`
		CreationInfo      spdxCreation       `json:"creationInfo"`
		Packages          []spdxPackage      `json:"packages"`
		Relationships     []spdxRelationship `json:"relationships"`
	}
	spdxCreation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	spdxPackage struct {
		ID               string         `json:"SPDXID"`
		Name             string         `json:"name"`
		Version          string         `json:"versionInfo,omitempty"`
		DownloadLocation string         `json:"downloadLocation"`
		FilesAnalyzed    bool           `json:"filesAnalyzed"`
		Checksums        []spdxChecksum `json:"checksums,omitempty"`
		LicenseConcluded string         `json:"licenseConcluded"`
		LicenseDeclared  string         `json:"licenseDeclared"`
		CopyrightText    string         `json:"copyrightText"`
		ExternalRefs     []spdxRef      `json:"externalRefs,omitempty"`
	}
	spdxChecksum struct {
		Algorithm string `json:"algorithm"`
		Value     string `json:"checksumValue"`
	}
	spdxRef struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	spdxRelationship struct {
		From string `json:"spdxElementId"`
		Type string `json:"relationshipType"`
		To   string `json:"relatedSpdxElement"`
	}
)

const unknown = "NOASSERTION"

// bill writes name.spdx.json: which modules each program was built from, as the program itself says,
// with the standard library as one more.
func (r release) bill(name string, programs []string) error {
	doc := spdxDocument{
		SPDXVersion: "SPDX-2.3", DataLicense: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: name,
		CreationInfo: spdxCreation{Created: r.Time.Format(time.RFC3339), Creators: []string{"Tool: landfall-release"}},
	}
	modules := map[string]bool{}
	all := sha256.New()
	for _, path := range programs {
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return err
		}
		sum, err := checksum(path)
		if err != nil {
			return err
		}
		all.Write([]byte(sum))
		id := "SPDXRef-Program-" + spdxID(filepath.Base(path))
		doc.Packages = append(doc.Packages, spdxPackage{
			ID: id, Name: filepath.Base(path), Version: r.Version, DownloadLocation: unknown,
			Checksums:        []spdxChecksum{{Algorithm: "SHA256", Value: sum}},
			LicenseConcluded: "Apache-2.0", LicenseDeclared: "Apache-2.0", CopyrightText: unknown,
		})
		doc.Relationships = append(doc.Relationships, spdxRelationship{doc.ID, "DESCRIBES", id})
		contain := func(module, version string) {
			m := modulePackage(module, version)
			if !modules[m.ID] {
				modules[m.ID] = true
				doc.Packages = append(doc.Packages, m)
			}
			doc.Relationships = append(doc.Relationships, spdxRelationship{id, "CONTAINS", m.ID})
		}
		contain("stdlib", strings.TrimPrefix(info.GoVersion, "go"))
		for _, dep := range info.Deps {
			if dep.Replace != nil {
				dep = dep.Replace
			}
			contain(dep.Path, dep.Version)
		}
	}
	// A document's namespace is its identity: another content needs another one.
	doc.DocumentNamespace = fmt.Sprintf("https://github.com/landfall-lb/landfall/spdx/%s-%s", name,
		hex.EncodeToString(all.Sum(nil)[:8]))
	text, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.Out, name+".spdx.json"), append(text, '\n'), 0o644)
}

func modulePackage(module, version string) spdxPackage {
	return spdxPackage{
		ID: "SPDXRef-Module-" + spdxID(module+"-"+version), Name: module, Version: version, DownloadLocation: unknown,
		LicenseConcluded: unknown, LicenseDeclared: unknown, CopyrightText: unknown,
		ExternalRefs: []spdxRef{{Category: "PACKAGE-MANAGER", Type: "purl", Locator: "pkg:golang/" + module + "@" + version}},
	}
}

// spdxID makes text fit for an identifier, which has letters, digits, dots and hyphens only.
func spdxID(text string) string {
	return strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || slices.Contains([]rune(".-"), c) {
			return c
		}
		return '-'
	}, text)
}
