package image

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// SBOM is what is in an image, or in an archive of programs: its bill of materials.
type SBOM struct {
	Name, Version string
	Created       time.Time
	// Purpose is one of SPDX's primary purposes of a package, such as CONTAINER.
	Purpose string
	Debian  []Package

	modules map[string]string // version by path
}

// AddProgram adds the modules that a Go program was built from.
func (s *SBOM) AddProgram(path string) error {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return fmt.Errorf("modules of %s: %w", filepath.Base(path), err)
	}
	if s.modules == nil {
		s.modules = map[string]string{}
	}
	s.modules["stdlib"] = info.GoVersion
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		s.modules[m.Path] = m.Version
	}
	return nil
}

// spdxPackage, and what follows, are the JSON of SPDX 2.3.
type spdxPackage struct {
	ID        string    `json:"SPDXID"`
	Name      string    `json:"name"`
	Version   string    `json:"versionInfo,omitempty"`
	Supplier  string    `json:"supplier,omitempty"`
	Homepage  string    `json:"homepage,omitempty"`
	Location  string    `json:"downloadLocation"`
	Analyzed  bool      `json:"filesAnalyzed"`
	Licence   string    `json:"licenseDeclared"`
	Concluded string    `json:"licenseConcluded"`
	Copyright string    `json:"copyrightText"`
	Purpose   string    `json:"primaryPackagePurpose,omitempty"`
	Refs      []spdxRef `json:"externalRefs,omitempty"`
}

type spdxRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type spdxRelation struct {
	From string `json:"spdxElementId"`
	Type string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

type spdxDocument struct {
	Version   string         `json:"spdxVersion"`
	Licence   string         `json:"dataLicense"`
	ID        string         `json:"SPDXID"`
	Name      string         `json:"name"`
	Namespace string         `json:"documentNamespace"`
	Creation  spdxCreation   `json:"creationInfo"`
	Packages  []spdxPackage  `json:"packages"`
	Relations []spdxRelation `json:"relationships"`
}

type spdxCreation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

const nothingSaid = "NOASSERTION"

func newPackage(kind, name, version, licence, url string) spdxPackage {
	p := spdxPackage{
		ID: "SPDXRef-" + kind + "-" + notInID.ReplaceAllString(name, "-"), Name: name, Version: version,
		Location: nothingSaid, Licence: licence, Concluded: nothingSaid, Copyright: nothingSaid,
	}
	if url != "" {
		p.Refs = []spdxRef{{Category: "PACKAGE-MANAGER", Type: "purl", Locator: url}}
	}
	return p
}

var notInID = regexp.MustCompile(`[^a-zA-Z0-9.-]`)

// document returns the bill as a document of SPDX.
func (s SBOM) document() spdxDocument {
	root := newPackage("Root", s.Name, s.Version, "Apache-2.0", "")
	root.Purpose = s.Purpose
	d := spdxDocument{
		Version: "SPDX-2.3", Licence: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: s.Name,
		Creation: spdxCreation{Created: s.Created.UTC().Format(time.RFC3339), Creators: []string{"Tool: landfall-image"}},
		Packages: []spdxPackage{root},
	}
	for _, p := range s.Debian {
		made := newPackage("Debian", p.Name, p.Version, nothingSaid,
			"pkg:deb/debian/"+p.Name+"@"+strings.ReplaceAll(p.Version, "+", "%2B")+"?arch="+p.Arch)
		made.Supplier, made.Homepage = "Organization: "+p.Maintainer, p.Homepage
		d.Packages = append(d.Packages, made)
	}
	for path, version := range s.modules {
		d.Packages = append(d.Packages, newPackage("Go", path, version, nothingSaid, "pkg:golang/"+path+"@"+version))
	}
	slices.SortFunc(d.Packages[1:], func(a, b spdxPackage) int { return strings.Compare(a.ID, b.ID) })
	sum := sha256.New()
	for i, p := range d.Packages {
		fmt.Fprintf(sum, "%s %s\n", p.Name, p.Version)
		relation := spdxRelation{From: root.ID, Type: "CONTAINS", To: p.ID}
		if i == 0 {
			relation = spdxRelation{From: d.ID, Type: "DESCRIBES", To: root.ID}
		}
		d.Relations = append(d.Relations, relation)
	}
	d.Namespace = "https://landfall.dev/spdx/" + s.Name + "-" + hex.EncodeToString(sum.Sum(nil))[:32]
	return d
}

// Write writes the bill in the JSON of SPDX 2.3.
func (s SBOM) Write(to string) error {
	text, err := json.MarshalIndent(s.document(), "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(to, append(text, '\n'), 0o644)
}
